"""Groups of options that several commands have: the patch, the model with how it is loaded, and the drawing."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from elfatt_sd.cli.console import adds_options, complain, name_and_value, optional, quiet_libraries
from elfatt_sd.errors import ElfattError
from elfatt_sd.toy import EMBEDDED

if TYPE_CHECKING:
    from elfatt_sd.config import PatchConfig
    from elfatt_sd.drawing.studio import Request

# Names that the helps list, without PyTorch, which takes seconds; tests/cli/test_errors.py compares them.
METHODS = ("sd", "tome", "agent", "elfatt", "elfatt-fast", "elfatt-quality")
DEFAULT = "auto"
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

METHOD = f"{DEFAULT} (what pays here), {', '.join(METHODS)}, package.module:Class, or saved settings."
_quoted = functools.partial(json.dumps, ensure_ascii=False)
_patch = functools.partial(optional, rich_help_panel="The patch")
PATCH_OPTIONS: dict[str, tuple[Any, Any]] = {
    "method": _patch(str, autocompletion=lambda: [DEFAULT, *METHODS], help=METHOD, show_default=DEFAULT),
    "config_file": _patch(str, "--config", metavar="FILE", help="Saved settings, as --method takes them, too."),
    "ratio": _patch(float, help="Fraction of the tokens that are merged, 0 to less than 1."),
    "stride": _patch(int, help="One merge destination for each cell of this many tokens a side."),
    "block_size": _patch(int, help="Tokens in a block; for sampled keys, how many every query sees."),
    "block_order": _patch(str, help=f"Which tokens share a block: {', '.join(BLOCK_ORDERS)}."),
    "agents": _patch(int, help="Number of agent tokens, where they are pooled."),
    "active_fraction": _patch(float, help="Fraction of the run in which the method's own attention is active, 0 to 1."),
    "max_downsample": _patch(int, help="Deepest level to patch: 1, 2, 4 or 8."),
    "patch_seed": _patch(int, help="Seed of random merge destinations, blocks and sampled keys."),
    "rand": _patch(bool, "--rand/--no-rand", help="Random or fixed merge destinations."),
    "attention_backend": _patch(str, help=f"One of {', '.join(BACKENDS)}."),
    "autotune": _patch(bool, "--autotune", help="Leave alone the layers that measure slower on this device."),
    "set": _patch(list[str], metavar="NAME=VALUE", help="Any other setting, such as fp32_logits=true."),
}
NAMES = {"patch_seed": "seed", "rand": "use_rand"}  # of options that are not those of their settings


class PatchOptions(NamedTuple):
    config: PatchConfig
    autotune: bool
    arguments: str  # those of `apply_patch` that say the same in Python


def build_patch(
    method: str | None = None,
    config_file: str | None = None,
    autotune: bool | None = None,
    set: list[str] | None = None,
    **options: Any,
) -> PatchOptions:
    from elfatt_sd.config import PatchConfig, method_named

    settings = {NAMES.get(name, name): value for name, value in options.items() if value is not None}
    settings |= dict(map(name_and_value, set or ()))
    if config_file is None:
        config = method_named(method := DEFAULT if method is None else method)
        source = _quoted(method)
    elif method is None:
        config = PatchConfig.load(config_file)
        source = f"elfatt_sd.PatchConfig.load({_quoted(config_file)})"
    else:
        raise ElfattError(f"method={method!r} and config={config_file!r} exclude each other; give one of them.")
    written = "".join(f", {name}={_quoted(v) if isinstance(v, str) else repr(v)}" for name, v in settings.items())
    written = source + written + ", autotune=True" * bool(autotune)
    return PatchOptions(config.with_settings(**settings), bool(autotune), written)


MODELS = f"{', '.join(EMBEDDED)}, a diffusers directory, a hub id, or a .safetensors file"
STEPS, GUIDANCE = (
    f"{text}; if not given {', '.join(f'{getattr(each, field):g} for {name}' for name, each in EMBEDDED.items())}, "
    "otherwise the pipeline's own."
    for text, field in (("Denoising steps", "steps"), ("Guidance scale", "guidance"))
)
LOADING: dict[str, tuple[Any, Any]] = {
    "device": optional(str, default="auto", help="auto, cpu, cuda, cuda:N, mps or xpu."),
    "dtype": optional(str, default="auto", help="auto, float32, float16 or bfloat16."),
    "allow_pickle": optional(bool, "--allow-pickle", default=False, help="Load pickles, which can run any code."),
    "variant": optional(str, help="Variant of the weights: fp16 loads *.fp16.safetensors."),
}
Graphs = Annotated[bool, typer.Option("--graphs", help="Replay calls of the denoiser as CUDA graphs, where that pays.")]
Height = Annotated[int | None, typer.Option(help="Height in pixels, a multiple of 8; the model's own if not given.")]
Width = Annotated[int | None, typer.Option(help="Width in pixels, a multiple of 8; the model's own if not given.")]
Steps = Annotated[int | None, typer.Option(help=STEPS)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
PromptFile = Annotated[Path | None, typer.Option("--prompt-file", metavar="FILE", help="One a line, .csv or .tsv.")]
DRAWING_OPTIONS: dict[str, tuple[Any, Any]] = {
    "steps": (Steps, None),
    "guidance": optional(float, help=GUIDANCE),
    "height": (Height, None),
    "width": (Width, None),
    "negative_prompt": optional(str, help="Prompt that guidance leads away from."),
    "scheduler": optional(
        str, autocompletion=lambda: list(SCHEDULERS), help=f"{', '.join(SCHEDULERS)}, or diffusers' class."
    ),
    "image": optional(Path, metavar="FILE", help="Begin with this image, at its own size if no other is given."),
    "strength": optional(float, help="How far to go from --image, above 0 to 1; the pipeline's own if not given."),
    "lora": optional(list[str], metavar="PATH[:SCALE]", help="LoRAs: a file, a folder, or OWNER/NAME/FILE of the hub."),
}


@dataclass(frozen=True)
class PipelineOptions:
    """A model and how it is loaded; see `load_pipeline`."""

    model: str
    device: str
    dtype: str
    allow_pickle: bool
    variant: str | None

    def load_for(self, request: Request) -> Any:
        """Load the pipeline, and say which words of the prompts it does not know."""
        from elfatt_sd.toy.renderer import COLORS, PATTERNS, SHAPES, unknown_words

        pipe = self.load(request.lora)
        unknown = sorted({word for prompt in request.prompts for word in unknown_words(prompt)})
        if self.model in EMBEDDED and unknown:
            named = ", ".join(map(repr, unknown[:10])) + f" and {len(unknown) - 10} more words" * (len(unknown) > 10)
            complain(
                f"the toy does not know {named}; it draws one of {', '.join(SHAPES)} in "
                f"{', '.join(COLORS)} on a {', '.join(PATTERNS)} background. For anything else give a real model: "
                "--model DIRECTORY, HUB-ID or FILE.safetensors",
                "note",
            )
        return pipe

    def load(self, lora: Sequence[str] | None = None) -> Any:
        from elfatt_sd.loading import load_loras, load_pipeline, read_lora

        quiet_libraries()
        loras = {given: read_lora(given) for given in lora or ()}
        pipe = load_pipeline(**vars(self))
        load_loras(pipe, loras)
        return pipe

    def python(self) -> str:
        """Return the line of Python that does the same."""
        given = json.dumps("path/or/hub-id" if self.model in SHAPE_NAMES else self.model)
        given += ", allow_pickle=True" * self.allow_pickle
        given += f", variant={json.dumps(self.variant)}" if self.variant else ""
        return f"pipe = elfatt_sd.load_pipeline({given})"


takes_patch = adds_options("chosen", PATCH_OPTIONS, build_patch)
takes_drawing = adds_options("drawing", DRAWING_OPTIONS, dict)


def takes_source(device: str = "auto") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    options = LOADING | {"device": (LOADING["device"][0], device)}
    return adds_options("source", options, lambda **given: functools.partial(PipelineOptions, **given))
