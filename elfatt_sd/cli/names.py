"""Names that the helps list, without PyTorch, which takes seconds; tests/cli/test_errors.py compares them."""

from __future__ import annotations

METHODS = ("sd", "tome", "agent", "elfatt", "elfatt-fast", "elfatt-quality")
DEFAULT = "elfatt"
BLOCK_ORDERS = ("sequence", "raster", "windows", "curve", "strided", "spread")
BACKENDS = (
    *("auto", "native", "flash", "flash_hub", "_flash_3", "_flash_3_hub", "_native_cudnn"),
    *("sage", "sage_hub", "xformers", "triton"),
)
SCHEDULERS = (
    *("ddim", "ddpm", "pndm", "euler", "euler-a", "heun", "dpm++", "dpm++-single", "dpm2", "dpm2-a"),
    *("unipc", "deis", "lcm", "tcd"),
)
METRICS = ("psnr", "ssim", "lpips", "dists")
UNET_NAMES = ("sd15", "sdxl")
_IMAGES = ("pixart", "sd3.5-medium", "flux", "chroma", "flux.2", "qwen-image", "z-image")
_VIDEOS = ("wan-1.3b", "wan-14b", "ltx-video", "hunyuan-video", "hunyuan-video-1.5", "cogvideox-5b")
SHAPE_NAMES = (*UNET_NAMES, *_IMAGES, *_VIDEOS)
PEERS = ("tomesd", "deepcache", "tgate", "first_block_cache", "pyramid_attention_broadcast", "taylorseer")
PEER = "tomesd"
ALONE = ("spread", "cell_spread", "sampled")
