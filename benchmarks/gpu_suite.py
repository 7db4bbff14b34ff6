"""All methods on one GPU in less than ten minutes: SD 1.5 and SDXL shapes with random weights, float16.

    python benchmarks/gpu_suite.py --out benchmarks/results

Needs torch, diffusers, tomesd and this repository; downloads nothing. `gpu_suite.json` is written again after every
part, and when the suite is stopped, with the whole rounds of the part that was going on. After `--seconds` no part is
begun, and soon after that it stops by itself. `--only` adds parts to those that are there, or measures them again.
`--tiny` tries all parts on any machine with small models.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from elfatt_sd.benchmarking.layer import growth
from elfatt_sd.benchmarking.merging import merging
from elfatt_sd.benchmarking.models import Model, make_model, random_unet
from elfatt_sd.benchmarking.record import Record, Session, code_hash
from elfatt_sd.benchmarking.rows import Results
from elfatt_sd.benchmarking.tables import markdown
from elfatt_sd.benchmarking.unet import unet
from elfatt_sd.benchmarking.variants import resolve_methods
from elfatt_sd.files import write_json
from elfatt_sd.measuring.machine import describe_machine
from elfatt_sd.pipelines import pick_device, pick_dtype
from tools.pages.goals import greatest_peak, verdict

TINY = {
    "block_out_channels": (32, 64, 64),
    "down_block_types": ("CrossAttnDownBlock2D",) * 2 + ("DownBlock2D",),
    "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 2,
    "attention_head_dim": 4,
    "cross_attention_dim": 32,
    "norm_num_groups": 8,
    "layers_per_block": 1,
}
GRACE = 70  # seconds that the last part may take
GOALS = [  # method, model, size, least gain over a run of 50 steps
    ("elfatt", "sd15", 512, 1.09),
    ("elfatt-fast", "sd15", 512, 1.25),
    ("elfatt-fast", "sd15", 1024, 1.8),
    ("elfatt-fast", "sd15", 2048, 3.0),
]


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
        sys.exit("\n".join([f"{unknown[0]!r} is no part; there are:", *parts]))
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


class Suite:
    """The parts of the suite and what they gave."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Take the options of the command line."""
        self.tiny: bool = options.tiny
        self.device = pick_device(options.device)
        out = options.out or Path("build/gpu_suite" if options.tiny else "benchmarks/results")
        self.path: Path = out / "gpu_suite.json"
        self.start = time.monotonic()
        self.limit: float = options.seconds
        self.results: dict[str, Any] = {"parts": {}, "errors": {}, "seconds": {}}
        if options.only is not None and self.path.exists():
            self.results = self.earlier()
        self.models: dict[str, Model] = {}
        self.session = Session()  # of the part that is going on
        self.parts: dict[str, Callable[[], Results]] = {
            "sd15 512 batch 1": lambda: self.unet("sd15", 512, 1, 15),
            "sd15 512 batch 8": lambda: self.unet("sd15", 512, 8, 20),
            "sd15 512 batch 48": lambda: self.unet("sd15", 512, 48, 35),
            "sd15 1024 batch 1": lambda: self.unet("sd15", 1024, 1, 20),
            "sd15 1024 batch 8": lambda: self.unet("sd15", 1024, 8, 35),
            "sd15 2048 batch 1": lambda: self.unet("sd15", 2048, 1, 35, batches=(1, 2)),
            "merging": self.merging,
            "growth": self.growth,
            "backends": self.backends,
            "sd15 1024 batch 1 flash": lambda: self.unet("sd15", 1024, 1, 10, few=True, attention_backend="flash"),
            "sd15 512 batch 1 graph": lambda: self.unet("sd15", 512, 1, 10, graphs=True),
            "sdxl 1024 batch 1": lambda: self.unet("sdxl", 1024, 1, 25),
            "sdxl 1024 batch 8": lambda: self.unet("sdxl", 1024, 8, 35),
            "sdxl 2048 batch 1": lambda: self.unet("sdxl", 2048, 1, 35, batches=(1, 2)),
            "sdxl 1024 batch 1 graph": lambda: self.unet("sdxl", 1024, 1, 10, graphs=True),
            "sdxl 512 batch 48": lambda: self.unet("sdxl", 512, 48, 20, few=True, batches=(48, 24)),
            "sdxl 1024 batch 48": lambda: self.unet("sdxl", 1024, 48, 20, few=True),
            "sd15 1024 batch 48": lambda: self.unet("sd15", 1024, 48, 20, few=True),
        }
        self.extra: dict[str, Callable[[], Results]] = {
            "sd15 512 batch 1 compiled": lambda: self.unet("sd15", 512, 1, 30, few=True, compile=True),
            "sd15 1024 batch 8 compiled": lambda: self.unet("sd15", 1024, 8, 30, few=True, compile=True),
        }

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
        self.session = Session()
        try:
            part()
        except BaseException as error:
            self.results["errors"][name] = f"{type(error).__name__}: {str(error)[:500]}"
            if not isinstance(error, Exception):
                raise
            traceback.print_exc(limit=-4, file=sys.stdout)
        finally:
            measured = self.session.results
            if measured is not None and measured["rows"]:
                self.results["parts"][name] = measured
                print(markdown(measured), flush=True)
            self.results["seconds"][name] = time.monotonic() - begun
            self.write()
        if self.device.type == "cuda":
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
        batches: Sequence[int] = (),
        attention_backend: str = "auto",
        **options: Any,
    ) -> Results:
        """Time the UNet with guidance: twice as many rows as images.

        Args:
            name: of the model.
            size: of the images.
            pictures: at a time.
            seconds: start no further round past this time.
            few: leave out most methods.
            batches: images at which the peak memory is measured; those that are timed by default.
            attention_backend: of all methods.
            **options: of `unet`.
        """
        if name not in self.models:
            self.models.clear()
            self.models[name] = self.make(name)
        methods = resolve_methods(
            ("tome", "elfatt", "elfatt-fast") if few else None, attention_backend=attention_backend
        )
        if self.tiny:
            size, pictures = size // 8, min(pictures, 3)
            batches = (pictures, pictures % 2 + 1)[: len(batches)]
        return unet(
            self.models[name],
            sizes=[size],
            methods=methods,
            batch=2 * pictures,
            repeats=1 if self.tiny else 7,
            seconds=seconds,
            device=str(self.device),
            memory=[2 * batch for batch in batches or (pictures,)],
            session=self.session,
            **options,
        )

    def make(self, name: str) -> Model:
        """Build a model with random weights."""
        dtype = pick_dtype("auto", self.device)
        if self.tiny:
            return Model(random_unet(TINY, self.device, dtype), 8)
        return make_model(name, self.device, dtype)

    def merging(self) -> Results:
        """Time matching, merge and unmerge beside tomesd's."""
        sizes, dtypes = ([256], ["float32"]) if self.tiny else ([4096, 16384], ["float32", "float16"])
        return merging(tokens=sizes, dtypes=dtypes, device=str(self.device), session=self.session)

    def growth(self) -> Results:
        """Time a layer from 4,096 to 65,536 tokens."""
        sizes = [256, 1024] if self.tiny else [4096, 9216, 16384, 36864, 65536]
        return growth(tokens=sizes, device=str(self.device), session=self.session)

    def backends(self) -> Results:
        """Time PyTorch's fused attention kernels on whole sequences and on blocks."""
        dtype = pick_dtype("auto", self.device)
        settings = {"dtype": str(dtype).removeprefix("torch.")}
        record = Record(self.session, "kernels", self.device, settings, bases=["default"])
        for batch, heads, tokens, size in [(2, 8, 4096, 40), (2, 10, 4096, 64), (2, 8, 16384, 40), (64, 8, 128, 40)]:
            tokens = tokens // 16 if self.tiny else tokens
            key = {"tokens": tokens, "batch": batch, "part": f"{heads} heads of {size}"}
            record.time(key, self.kernels(dtype, batch, heads, tokens, size), 5)
        return record.results

    def kernels(
        self, dtype: torch.dtype, batch: int, heads: int, tokens: int, size: int
    ) -> dict[str, Callable[[], Any]]:
        """Return a call for every kernel that takes this shape."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q, k, v = torch.randn(3, batch, tokens, heads, size, device=self.device, dtype=dtype).transpose(2, 3)

        def attend(*kernels: SDPBackend) -> None:
            if not kernels:
                torch.nn.functional.scaled_dot_product_attention(q, k, v)
                return
            with sdpa_kernel(list(kernels)):
                torch.nn.functional.scaled_dot_product_attention(q, k, v)

        calls: dict[str, Callable[[], Any]] = {"default": attend}
        for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            try:
                attend(kernel)
            except RuntimeError:  # not for this device or shape
                continue
            calls[kernel.name.removesuffix("_ATTENTION").lower()] = lambda kernel=kernel: attend(kernel)
        return calls

    def conclude(self) -> None:
        """Print the goals, the greatest peaks and the memory slopes."""
        self.results["goals"] = [
            {"part": name, "method": method, "gain": row["speed"]["untouched"]["median"], "goal": least}
            | {"rounds": row["rounds"]}
            for method, model, size, least in GOALS
            for name, part in self.results["parts"].items()
            if name.startswith(f"{model} {size} batch")
            for row in part["rows"]
            if row["method"] == method and "untouched" in row["speed"]
        ]
        self.results["memory_slope"] = self.memory_slopes()
        self.results["peaks"] = self.peaks()
        self.results["seconds"]["all"] = time.monotonic() - self.start
        self.write()
        print("\n## Goals over a run of 50 steps")
        for goal in self.results["goals"]:
            said = verdict(goal["gain"] >= goal["goal"], goal["rounds"])
            print(f"{goal['part']}, {goal['method']}: {goal['gain']:.2f}, goal {goal['goal']}: {said}")
        print("\n## Greatest peak of our methods as a share of the untouched call's")
        for name, peak in self.results["peaks"].items():
            print(f"{name}: {peak['share']:.3f} ({peak['method']})")
        print("\n## Peak memory of one more image in the batch, GB")
        for name, slopes in self.results["memory_slope"].items():
            print(f"{name}: " + ", ".join(f"{method} {slope:.3f}" for method, slope in slopes.items()))
        print(f"\nerrors: {self.results['errors'] or 'none'}; {self.results['seconds']['all']:.0f} s; {self.path}")

    def memory_slopes(self) -> dict[str, dict[str, float]]:
        """Work out, from the largest and the least batch of a size, the peak memory of one more image in GB."""
        peaks: dict[str, dict[str, dict[int, int]]] = {}
        slopes: dict[str, dict[str, float]] = {}
        for name, part in self.results["parts"].items():
            shape = " ".join(name.split()[:2])
            for row in part["rows"] if name.split()[-1].isdigit() else ():
                if row["bytes_per_picture"] is not None:
                    slopes.setdefault(shape, {})[row["method"]] = row["bytes_per_picture"] / 1e9
                elif row["peak_bytes"] is not None:
                    known = peaks.setdefault(shape, {}).setdefault(row["method"], {})
                    known[row["batch"] // 2] = row["peak_bytes"]
        for shape, methods in peaks.items():
            for method, known in methods.items():
                if len(known) > 1:
                    growth = (known[max(known)] - known[min(known)]) / (max(known) - min(known))
                    slopes.setdefault(shape, {})[method] = growth / 1e9
        return slopes

    def peaks(self) -> dict[str, dict[str, Any]]:
        """Return, for each part with peaks, which of our methods has the greatest, and its share of untouched's."""
        found = {name: greatest_peak(part) for name, part in self.results["parts"].items() if "runs" in part}
        return {name: {"method": method, "share": share} for name, (method, share) in found.items() if share}


if __name__ == "__main__":
    main()
