"""All methods on one GPU in less than ten minutes: shapes of UNets and transformers with random weights, float16.

    python benchmarks/gpu_suite.py --out benchmarks/results
    python -m benchmarks.shown benchmarks/results/gpu_suite.json

Needs torch with Triton, diffusers, tomesd and this repository; downloads nothing. Exact attention through flash-attn 2
(wheel `flash-attn`), flash-attn 3 (`flash-attn-3`) and SageAttention (`sageattention`) is a competitor where these
are installed; what is not there is named. First comes what is unknown: whether methods compute on this GPU what they
compute on a CPU, then speed where their host's work hides it least, then the rest. `gpu_suite.json` is written
after every part, and when the suite is stopped, with the whole rounds of the part that was going on. After `--seconds`
no part is begun, and soon after that it stops by itself. A part that fails, or a method in one, is named and costs
nothing else. `--only` adds parts to those that are there, or measures them again. `--tiny` tries all parts on any
machine with small models, and without CUDA in place of graphs plain calls.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import benchmarks.shown  # noqa: F401  (how results of its parts look)
import elfatt_sd
from benchmarks.correctness import correctness
from benchmarks.device_time import profile
from benchmarks.goals import all_goals, greatest_peaks, memory_slopes, verdict
from benchmarks.graphs import graphed_call, replayed
from benchmarks.growth import growth
from benchmarks.merging import merging
from elfatt_sd.attention.softmax import make_ready, softmax_attention
from elfatt_sd.benchmarking import Model, fill, make_model, unet
from elfatt_sd.benchmarking.report import Results, Session, markdown
from elfatt_sd.devices import describe_machine
from elfatt_sd.errors import ElfattError, is_out_of_memory
from elfatt_sd.families.shapes import Shape, empty_model
from elfatt_sd.files import write_json
from elfatt_sd.loading import pick_device, pick_dtype
from elfatt_sd.phases import Backend

_TINY = {
    "block_out_channels": (32, 64, 64),
    "down_block_types": ("CrossAttnDownBlock2D",) * 2 + ("DownBlock2D",),
    "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 2,
    "attention_head_dim": 4,
    "cross_attention_dim": 32,
    "norm_num_groups": 8,
    "layers_per_block": 1,
}
TINY_FLUX = Shape(
    "FluxTransformer2DModel",
    {"num_attention_heads": 2, "attention_head_dim": 32, "axes_dims_rope": (8, 12, 12), "joint_attention_dim": 32}
    | {"pooled_projection_dim": 16, "num_layers": 1, "num_single_layers": 1, "guidance_embeds": True},
    {},
)
# Small enough for a CPU, with the head sizes of Stable Diffusion 1.5's two finest levels.
_CHECKED = {**_TINY, "block_out_channels": (160, 320, 320), "norm_num_groups": 32}
TINY, CHECKED = (Shape("UNet2DConditionModel", config, {}) for config in (_TINY, _CHECKED))
COMPETITORS: tuple[Backend, ...] = ("_native_cudnn", "flash", "_flash_3", "sage")
FEW = ("tome", "elfatt", "elfatt-fast")
KERNELS = [(2, 8, 4096, 40), (2, 10, 4096, 64), (2, 8, 16384, 40), (1, 24, 4608, 128), (64, 8, 128, 40)]
GRACE = 70  # seconds that the last part may take


def main() -> None:
    """Run the parts in the order of their weight, as long as there is time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, help="folder for gpu_suite.json (benchmarks/results; with --tiny build/gpu_suite)"
    )
    parser.add_argument("--seconds", type=float, default=500, help="start no part past this time")
    parser.add_argument("--only", help="parts to run, separated by commas; 'list' shows them")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true", help="small models and sizes, on any machine")
    options = parser.parse_args()
    suite = Suite(options)
    parts = suite.parts | suite.extra
    names = list(suite.parts) if options.only is None else options.only.split(",")
    if unknown := [name for name in names if name not in parts]:
        sys.exit("\n".join([f"{unknown[0]!r} is not a part; there are:", *parts]))
    if suite.device.type == "cpu" and not suite.tiny:
        sys.exit("there is no GPU here; --tiny tries the suite on any machine")
    try:
        with stopping(options.seconds + GRACE):
            for name in names:
                suite.run(name, parts[name])
    finally:  # also when it is stopped
        suite.conclude()


@contextmanager
def stopping(seconds: float) -> Iterator[None]:
    """Raise SystemExit inside after a time (not on Windows), and where the process is asked to end."""

    def stop(number: int, _: object) -> NoReturn:
        sys.exit(f"stopped by {signal.Signals(number).name}")

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGALRM") if hasattr(signal, name)]
    before = {number: signal.signal(number, stop) for number in numbers}
    timed = hasattr(signal, "setitimer")
    if timed:
        signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def code_hash() -> str:
    """Return a hash of the package: parts that other code gave are not compared."""
    digest = hashlib.sha256()
    for path in sorted(Path(elfatt_sd.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class KeepsGoing(Session):
    """Leaves out a variant that fails, and keeps the reason."""

    def lose(self, key: Mapping[str, Any], variant: str, error: Exception) -> None:
        if is_out_of_memory(error):
            super().lose(key, variant, error)
        else:
            failed = self.group(key).setdefault("failed", {})
            failed[variant] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


class Suite:
    """The parts of the suite and what they gave."""

    file = "gpu_suite.json"

    def __init__(self, options: argparse.Namespace) -> None:
        """Take the options of the command line."""
        self.tiny: bool = options.tiny
        self.device = pick_device(options.device)
        out = options.out or Path("build/gpu_suite" if options.tiny else "benchmarks/results")
        self.path: Path = out / self.file
        self.start = time.monotonic()
        self.limit: float = options.seconds
        self.results: dict[str, Any] = {"parts": {}, "errors": {}, "seconds": {}}
        if options.only is not None and self.path.exists():
            self.results = self.earlier()
        self.models: dict[str, Model] = {}
        self.session = Session()  # of the part that is going on
        self.competitors, self.results["missing"] = self.there()
        graph = {"graphed": graphed_call if self.device.type == "cuda" else None}
        few = graph | {"few": True}
        self.parts: dict[str, Callable[[], Results]] = {
            "correctness": self.correctness,
            "sd15 512 batch 1 graph": lambda: self.unet("sd15", 512, 1, 20, **graph),
            "sd15 1024 batch 1 graph": lambda: self.unet("sd15", 1024, 1, 20, **graph),
            "sd15 1024 batch 1 graph triton": lambda: self.unet("sd15", 1024, 1, 15, backend="triton", **few),
            "sd15 768 batch 1 graph": lambda: self.unet("sd15", 768, 1, 15, **few),
            "sd15 512 batch 1 host": lambda: self.profile("sd15", 512),
            "sd15 2048 batch 1": lambda: self.unet("sd15", 2048, 1, 35, batches=(1, 2)),
            "sd15 512 batch 8": lambda: self.unet("sd15", 512, 8, 20),
            "sdxl 1024 batch 1 graph": lambda: self.unet("sdxl", 1024, 1, 20, **graph),
            "kernels": self.kernels,
            "flux 1024 batch 1": lambda: self.unet("flux", 1024, 1, 15, guided=False),
            "flux 2048 batch 1": lambda: self.unet("flux", 2048, 1, 15, guided=False),
            "merging": self.merging,
            "growth": self.growth,
            "sd15 1024 batch 1 graph channels_last": lambda: self.unet("sd15 channels_last", 1024, 1, 10, **few),
            "sdxl 2048 batch 1": lambda: self.unet("sdxl", 2048, 1, 35, batches=(1, 2)),
            "sdxl 1024 batch 1 host": lambda: self.profile("sdxl", 1024),
            "sd3.5-medium 1024 batch 1": lambda: self.unet("sd3.5-medium", 1024, 1, 15),
            "qwen-image 1024 batch 1": lambda: self.unet("qwen-image", 1024, 1, 15),
            "sd15 1024 batch 1": lambda: self.unet("sd15", 1024, 1, 20),
            "sd15 512 batch 1": lambda: self.unet("sd15", 512, 1, 15),
            "sdxl 1024 batch 1": lambda: self.unet("sdxl", 1024, 1, 25),
            "sd15 1024 batch 8": lambda: self.unet("sd15", 1024, 8, 35, few=True),
            "sd15 512 batch 48": lambda: self.unet("sd15", 512, 48, 35, few=True),
            "sdxl 1024 batch 8": lambda: self.unet("sdxl", 1024, 8, 35, few=True),
        }
        self.extra: dict[str, Callable[[], Results]] = {
            "sd15 1024 batch 48": lambda: self.unet("sd15", 1024, 48, 20, few=True),
            "sdxl 512 batch 48": lambda: self.unet("sdxl", 512, 48, 20, few=True, batches=(48, 24)),
            "sdxl 1024 batch 48": lambda: self.unet("sdxl", 1024, 48, 20, few=True),
            "sd15 512 batch 1 compiled": lambda: self.unet("sd15", 512, 1, 30, few=True, compile=True),
            "sd15 1024 batch 8 compiled": lambda: self.unet("sd15", 1024, 8, 30, few=True, compile=True),
        }

    def there(self) -> tuple[list[Backend], dict[str, str]]:
        """Return the competitors whose packages are there, and for the others how to install them."""
        found: list[Backend] = []
        missing: dict[str, str] = {}
        for name in COMPETITORS:
            try:
                make_ready(name)
                found.append(name)
            except ElfattError as error:
                missing[name] = str(error)
        return found, missing

    def earlier(self) -> dict[str, Any]:
        """Return the results that are there, to which single parts are added, or whose place they take."""
        results: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
        here = {"device": describe_machine(self.device)["device"], "code_sha256": code_hash()}
        for name, part in results["parts"].items():
            if any(part["machine"].get(key) != value for key, value in here.items()):
                sys.exit(f"{self.path} holds {name!r} of another machine or of other code; give another --out")
        return results

    def run(self, name: str, part: Callable[[], Results]) -> None:
        """Run one part and write what there is; an error is written down and the suite goes on.

        What a part had measured when it failed or was stopped is kept.
        """
        self.results["errors"].pop(name, None)
        begun = time.monotonic()
        if begun - self.start > self.limit:
            self.results["errors"][name] = "no time left"
            return
        print(f"\n## {name} ({begun - self.start:.0f} s)", flush=True)
        self.session = KeepsGoing()
        try:
            part()
        except BaseException as error:
            self.results["errors"][name] = f"{type(error).__name__}: {str(error)[:500]}"
            if not isinstance(error, Exception):
                raise
            traceback.print_exc(limit=-4, file=sys.stdout)
        finally:
            measured = self.session.results
            if measured.get("rows"):
                measured["machine"]["code_sha256"] = code_hash()
                self.results["parts"][name] = measured
            self.results["seconds"][name] = time.monotonic() - begun
            self.write()
            try:  # rows that cannot be shown are in the file, and the next part goes on
                print(markdown(measured) if measured.get("rows") else "", flush=True)
            except Exception:
                traceback.print_exc(limit=-4, file=sys.stdout)
        if self.device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # after a capture that failed, an older PyTorch has none
                torch.cuda.empty_cache()

    def write(self) -> None:
        """Write the results so far, whole."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, self.results)

    def unet(
        self,
        name: str,
        size: int,
        pictures: int,
        seconds: float,
        *,
        few: bool = False,
        guided: bool = True,
        batches: Sequence[int] = (),
        backend: Backend = "auto",
        **options: Any,
    ) -> Results:
        """Time a denoiser.

        Args:
            name: of the model.
            size: of the images.
            pictures: images at a time.
            seconds: start no further round past this time.
            few: leave out most methods, and competitors.
            guided: with two rows for each image.
            batches: images at which the peak memory is measured; those that are timed by default.
            backend: of all methods.
            **options: of `unet`.
        """
        rows = 1 + guided
        if self.tiny:
            size, pictures = size // 8, min(pictures, 3)
            batches = (pictures, pictures % 2 + 1)[: len(batches)]
        return unet(
            self.model(name),
            sizes=[size],
            methods=FEW if few else None,
            attention_backend=backend,
            competitors=() if few else self.competitors,
            batch=rows * pictures,
            repeats=1 if self.tiny else 7,
            seconds=seconds,
            device=str(self.device),
            memory=[rows * batch for batch in batches or (pictures,)],
            session=self.session,
            **options,
        )

    def model(self, name: str) -> Model:
        """Return a model; one at a time is kept."""
        if name not in self.models:
            self.models.clear()
            self.models[name] = self.make(name, self.device, pick_dtype("auto", self.device))
        return self.models[name]

    def make(self, name: str, device: torch.device, dtype: torch.dtype) -> Model:
        """Build a model with random weights."""
        shape, _, layout = name.partition(" ")
        if not self.tiny:
            made = make_model(shape, device, dtype)
        else:
            tiny = TINY if shape.startswith("sd") and shape != "sd3.5-medium" else TINY_FLUX
            made = Model(fill(empty_model(tiny), device, dtype), 8)
        if layout:
            made.unet.to(memory_format=getattr(torch, layout))
        return made

    def correctness(self) -> Results:
        """Compare methods on this device with a CPU in float32: small models, all presets, also in Triton's kernels."""
        cpu = torch.device("cpu")
        unet = Model(fill(empty_model(TINY if self.tiny else CHECKED), cpu, torch.float32), 8)
        flux = Model(fill(empty_model(TINY_FLUX), cpu, torch.float32), 8)
        return correctness(
            {"UNet": unet, "Flux": flux},
            size=64 if self.tiny else 256,
            device=self.device,
            dtypes=[torch.float32, torch.bfloat16 if self.device.type == "cpu" else pick_dtype("auto", self.device)],
            backends=["auto", *(["triton"] if self.device.type == "cuda" else [])],
            session=self.session,
        )

    def profile(self, name: str, size: int) -> Results:
        """Take the time on the host and on the device, and the kernels."""
        return profile(
            self.model(name),
            size=size // 8 if self.tiny else size,
            batch=2,
            device=self.device,
            methods=FEW,
            competitors=self.competitors,
            session=self.session,
        )

    def merging(self) -> Results:
        """Time matching, merge and unmerge, and tomesd's."""
        sizes, dtypes = ([256], ["float32"]) if self.tiny else ([4096, 16384], ["float32", "float16"])
        return merging(tokens=sizes, dtypes=dtypes, device=str(self.device), session=self.session)

    def growth(self) -> Results:
        """Time a layer from 4,096 to 65,536 tokens."""
        sizes = [256, 1024] if self.tiny else [4096, 9216, 16384, 36864, 65536]
        return growth(tokens=sizes, device=str(self.device), session=self.session)

    def kernels(self) -> Results:
        """Time PyTorch's fused attention kernels and the competitors' on whole sequences and on blocks."""
        dtype = pick_dtype("auto", self.device)
        settings = {"dtype": str(dtype).removeprefix("torch.")}
        record = self.session.begin("kernels", self.device, settings, bases=["default"])
        for batch, heads, tokens, size in KERNELS:
            tokens = tokens // 16 if self.tiny else tokens
            key = {"tokens": tokens, "batch": batch, "part": f"{heads} heads of {size}"}
            record.time(key, self.attentions(dtype, batch, heads, tokens, size), 5)
        return record.results

    def attentions(
        self, dtype: torch.dtype, batch: int, heads: int, tokens: int, size: int
    ) -> dict[str, Callable[[], Any]]:
        """Return a call for every kernel; those that do not take a shape fail as they warm up, and are lost."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q, k, v = torch.randn(3, batch, tokens, heads, size, device=self.device, dtype=dtype)

        def fused(*kernels: SDPBackend) -> None:
            with sdpa_kernel(list(kernels)) if kernels else nullcontext():
                softmax_attention(q, k, v)

        kinds = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
        calls: dict[str, Callable[[], Any]] = {"default": fused}
        calls |= {f"native {kind.name.split('_')[0].lower()}": partial(fused, kind) for kind in kinds}
        packages = [name for name in self.competitors if name != "_native_cudnn"]
        calls |= {name: partial(softmax_attention, q, k, v, backend=name) for name in packages}
        return {name: replayed(call, self.device) for name, call in calls.items()}

    def conclude(self) -> None:
        """Print the goals, the greatest peaks and the memory slopes."""
        parts = self.results["parts"]
        self.results["goals"] = all_goals(parts)
        self.results["memory_slope"], self.results["peaks"] = memory_slopes(parts), greatest_peaks(parts)
        self.results["seconds"]["all"] = time.monotonic() - self.start
        self.write()
        print("\n## Goals")
        for goal in self.results["goals"]:
            said = verdict(goal["gain"] >= goal["goal"], goal["rounds"])
            print(f"{goal['part']}, {goal['method']}, {goal['what']}: {goal['gain']:.2f}, goal {goal['goal']}: {said}")
        print("\n## Greatest peak of our methods as a fraction of the untouched call's")
        for name, peak in self.results["peaks"].items():
            print(f"{name}: {peak['share']:.3f} ({peak['method']})")
        print("\n## Peak memory of one more image in the batch, GB")
        for name, slopes in self.results["memory_slope"].items():
            print(f"{name}: " + ", ".join(f"{method} {slope:.3f}" for method, slope in slopes.items()))
        for name, why in self.results["missing"].items():
            print(f"\nnot there: {name}: {why}")
        print(f"\nerrors: {self.results['errors'] or 'none'}; {self.results['seconds']['all']:.0f} s; {self.path}")


if __name__ == "__main__":
    main()
