"""The next ten minutes on a GPU: graphs, layouts, kernels, transformers, tuning, in the order of what is unknown.

    python benchmarks/gpu_next.py --out benchmarks/results
    python benchmarks/gpu_next.py --tiny --device cpu

It ends after `--seconds` (590) at the latest. Each part has a time of its own and is guarded: what fails in it is
written down with its traceback, and the next part begins. `gpu_next.json` is written after every part. Ratios are of
rounds in which all rows ran, with their spread. `--tiny` tries all parts on any machine with small models; on a CPU
plain calls stand in for graphs, and what needs CUDA is named.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import elfatt_sd
from benchmarks import common
from benchmarks.gpu_suite import Suite
from benchmarks.graphs import graphed_call, replayed
from elfatt_sd import benchmarking
from elfatt_sd.attention.ordering import Grid
from elfatt_sd.attention.softmax import softmax_attention
from elfatt_sd.benchmarking import Model, unet_call
from elfatt_sd.benchmarking.report import Results, Session
from elfatt_sd.benchmarking.variants import UNTOUCHED, Variant, single_phases
from elfatt_sd.config import PatchConfig
from elfatt_sd.drawing.studio import own_settings
from elfatt_sd.families import copy_structure, family_of
from elfatt_sd.families.cuts import Stand, Taking
from elfatt_sd.loading import load_pipeline, pick_dtype
from elfatt_sd.measure import Call, timed
from elfatt_sd.methods import Draws
from elfatt_sd.phases import Phase
from elfatt_sd.runtime.call import Call as PatchCall
from elfatt_sd.runtime.call import attend
from elfatt_sd.runtime.joint_processor import Projected
from elfatt_sd.runtime.layout import Layout
from elfatt_sd.runtime.processor import LayerInCall

ROOT = Path(__file__).resolve().parent.parent
TESTS = 100  # seconds of the tests that need a GPU
LIMIT, LAST = 520, 12  # seconds of all parts, and those that are kept to write and to end
# heads, and frames, rows and columns of tokens: Flux at 1024 and 2048 with its text, Wan 1.3B at 480p and 720p
ATTENTIONS = [(24, (1, 64, 72)), (24, (1, 128, 132)), (12, (21, 30, 52)), (12, (21, 45, 80))]
FAST = "elfatt-fast"
LAYOUTS = ("NCHW", "channels_last", "channels_last, norm")


class OutOfTime(BaseException):
    """A part has had its time; no row takes it for a failure of its own."""


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` inside after a time, and again every two seconds, as somebody may have caught it."""
    if not hasattr(signal, "setitimer"):  # Windows
        yield
        return

    def stop(*_: object) -> None:
        raise OutOfTime(f"after {seconds:.0f} s")

    begun, before = time.monotonic(), signal.signal(signal.SIGALRM, stop)
    outer, _ = signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.1), 2.0)
    try:
        yield
    finally:
        left = max(outer - (time.monotonic() - begun), 0.1) if outer else 0.0
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, left, 2.0)


class Next(Suite):
    """The parts, each with its seconds."""

    file = "gpu_next.json"

    def __init__(self, options: argparse.Namespace) -> None:
        """Take the options of the command line."""
        super().__init__(options)
        self.ends = math.inf  # of the part that goes on, on the monotonic clock
        unets = {"methods": [FAST], "rows": 2}
        self.timed_parts: dict[str, tuple[float, Callable[[], Any]]] = {
            "layouts": (90, self.layouts),
            "tests": (TESTS, self.tests),
            "shallow": (20, self.shallow),
            "attentions": (50, self.attention),
            "flux": (50, lambda: self.sizes("flux", (1024, 2048))),
            "wan": (60, lambda: self.sizes("wan-1.3b", ("832x480", "1280x720"))),
            "sd15 512 batch 8": (25, lambda: self.sizes("sd15", (512,), methods=[FAST], rows=16)),
            "sd15 1024 batch 4": (25, lambda: self.sizes("sd15", (1024,), methods=[FAST], rows=8)),
            "sd15 2048": (25, lambda: self.sizes("sd15", (2048,), **unets)),
            "sdxl 1024": (25, lambda: self.sizes("sdxl", (1024,), **unets)),
            "graphs": (45, self.graphs),
            "tune": (90, self.tune),
        }
        self.parts = {name: part for name, (_, part) in self.timed_parts.items()}
        self.extra = {}
        self.results["tracebacks"] = {}

    def run(self, name: str, part: Callable[[], Any]) -> None:
        """Run one part in its time; nothing that it raises stops the others."""
        left = self.start + self.limit - LAST - time.monotonic()
        own = min(self.timed_parts[name][0] * (4 if self.tiny else 1), left)  # on a CPU, perhaps a busy one
        if own <= 1:
            self.results["errors"][name] = "no time left"
            return
        self.ends = time.monotonic() + 0.9 * own

        def guarded() -> Any:
            try:
                with alarm(own):
                    return part()
            except (Exception, OutOfTime) as error:
                self.results["tracebacks"][name] = traceback.format_exc(limit=-8)
                raise (TimeoutError(*error.args) if isinstance(error, OutOfTime) else error) from None

        super().run(name, guarded)
        self.models.clear()
        gc.collect()

    @property
    def left(self) -> float:
        """Seconds in which a round of the part may still begin."""
        return self.ends - time.monotonic()

    def side(self, size: Any) -> Any:
        """Return a size, or that of a tiny model."""
        return size if not self.tiny else 64

    def begin(self, kind: str, base: str, **settings: Any) -> Session:
        """Begin the rows of a part, whose ratios are to one of them."""
        dtype = str(pick_dtype("auto", self.device)).removeprefix("torch.")
        return self.session.begin(kind, self.device, {"dtype": dtype, **settings}, bases=[base])

    def call(self, unit: Any, inputs: dict[str, Any], variant: Variant = UNTOUCHED) -> Call:
        """Return a call as a graph; on a CPU as it is."""
        return graphed_call(unit, inputs, variant) if self.device.type == "cuda" else unet_call(unit, inputs)

    def sizes(
        self, name: str, sizes: tuple[Any, ...], methods: Any = (FAST, "elfatt-quality"), rows: int = 1
    ) -> Results:
        """Time calls of a denoiser in every phase of methods, as graphs."""
        return benchmarking.unet(
            self.model(name),
            sizes=list(dict.fromkeys(map(self.side, sizes))),
            methods=list(methods),
            batch=rows,
            repeats=1 if self.tiny else 5,
            seconds=self.left / len(sizes),
            device=str(self.device),
            graphed=graphed_call if self.device.type == "cuda" else None,
            memory=[],
            session=self.session,
        )

    def layouts(self) -> Results:
        """Time SD 1.5's shape in every layout, as graphs, eager and compiled; untouched and in the method's phase."""
        record = self.begin("layouts", "untouched, NCHW")
        variants = {"untouched": UNTOUCHED, FAST: single_phases(PatchConfig.preset(FAST))[-1][0]}
        models = {layout: self.laid_out(layout) for layout in LAYOUTS}
        for share, size in ((0.4, 512), (0.8, 1024)):
            key, calls = {"size": self.side(size), "batch": 2}, dict[str, Call]()
            for method, variant in variants.items():
                for layout, model in models.items():
                    unit, inputs = variant.install(copy_structure(model.unet)), model.inputs(self.side(size), 2)
                    calls[f"{method}, {layout}"] = self.call(unit, inputs, variant)
                    if layout == "NCHW":
                        unit = variant.install(copy_structure(model.unet))
                        calls[f"{method}, {layout}, eager"] = unet_call(unit, inputs)
            seconds = share * self.left
            record.time(key, calls, 1 if self.tiny else 5, seconds=seconds)
        self.compiled(record, models["NCHW"], variants)
        return record.results

    def compiled(self, record: Session, model: Model, variants: dict[str, Variant]) -> None:
        """Add what is compiled, blocks and then the whole, as far as there is time."""
        import torch._dynamo

        torch._dynamo.config.recompile_limit = 64  # type: ignore[attr-defined]
        inputs, key = model.inputs(self.side(512), 2), {"size": self.side(512), "batch": 2}
        how: dict[str, Any] = {"dynamic": False, "backend": "eager" if self.tiny else "inductor"}
        calls = {"untouched, NCHW": self.call(copy_structure(model.unet), inputs)}
        for method, variant in variants.items():
            unit = variant.install(copy_structure(model.unet))
            for part in unit.modules():
                if type(part).__name__ == "BasicTransformerBlock":
                    part.compile(**how)
            calls[f"{method}, blocks compiled"] = self.call(unit, inputs, variant)
        record.time({**key, "part": "blocks compiled"}, calls, 1 if self.tiny else 5, seconds=0.5 * self.left)
        unit = copy_structure(model.unet)
        unit.compile(**how)
        calls = {
            "untouched, NCHW": calls["untouched, NCHW"],
            "untouched, compiled": replayed(unet_call(unit, inputs), self.device),
        }
        record.time({**key, "part": "compiled"}, calls, 1 if self.tiny else 5, seconds=self.left)

    def laid_out(self, layout: str) -> Model:
        """Return a model with weights of its own in a layout."""
        model = self.make("sd15", self.device, pick_dtype("auto", self.device))
        if layout == "channels_last":
            model.unet.to(memory_format=torch.channels_last)
        elif layout != "NCHW":
            Layout(model.unet)
        return model

    def shallow(self) -> Results:
        """Time a call that takes deep features over, which is what such a step leaves."""
        record, model = self.begin("shallow", "whole"), self.model("sd15")
        for size in (512, 1024):
            inputs, takings = model.inputs(self.side(size), 2), [Taking()]
            unit: Any = copy_structure(model.unet)
            family = family_of(unit)
            for part in family.cut(unit, family.cuts(unit)[0]):
                Stand(part, lambda takings=takings: takings[-1])
            shallow = unet_call(unit, inputs)
            shallow()
            takings.append(Taking(takings[0].kept))
            calls = {"whole": self.call(model.unet, inputs), "shallow": replayed(shallow, self.device)}
            record.time({"size": self.side(size), "batch": 2}, calls, 1 if self.tiny else 7, seconds=self.left / 2)
        return record.results

    def attention(self) -> Results:
        """Time exact attention through each kernel, log-sum-exps, and what is sampled, by PyTorch and by Triton."""
        record = self.begin("attentions", "default")
        for heads, sides in ATTENTIONS:
            grid = Grid(1, 8, 8) if self.tiny else Grid(*sides)
            key = {"tokens": grid.tokens, "batch": 1, "part": f"{heads} heads of 128"}
            calls = {name: replayed(call, self.device) for name, call in self.kernels_on(heads, grid).items()}
            with torch.no_grad():
                record.time(key, calls, 1 if self.tiny else 5, seconds=self.left / 3)
        return record.results

    def kernels_on(self, heads: int, grid: Grid) -> dict[str, Call]:
        """Return a call for each kernel; those that do not take the tensors, or the machine, are lost one by one."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        q, k, v = torch.randn(3, 1, grid.tokens, heads, 128, device=self.device, dtype=dtype)
        turned, ops = [x.transpose(1, 2) for x in (q, k, v)], torch.ops.aten

        def fused(kind: Any) -> None:
            with sdpa_kernel([kind]):
                softmax_attention(q, k, v)

        calls: dict[str, Call] = {"default": lambda: softmax_attention(q, k, v)}
        for name in ("CUDNN", "FLASH", "EFFICIENT"):
            calls[name.lower()] = partial(fused, getattr(SDPBackend, f"{name}_ATTENTION"))
        cudnn, flash = ops._scaled_dot_product_cudnn_attention, ops._scaled_dot_product_flash_attention
        calls["cudnn, sums"] = lambda: cudnn(*turned, None, True, 0.0, False, False)
        calls["flash, sums"] = lambda: flash(*turned, 0.0, False, False)
        own = [Phase(1.0, "sampled", keys=512).attention, Phase(1.0, "cell_spread", block_size=512, cell=64).attention]
        for attention in own:
            prepared = attention.prepare(grid, Draws(0, 0, 0, self.device))
            for backend in ("native", "triton") if attention.name == "sampled" else ("native",):
                given = (q, k, v, attention, prepared, backend)
                calls[f"{attention.name}, {backend}"] = partial(self.sampled, *given)
        return calls

    @staticmethod
    def sampled(q: Any, k: Any, v: Any, attention: Any, prepared: Any, backend: Any) -> None:
        """Attend to what was sampled before."""
        config = PatchConfig(attention_backend=backend)
        state: Any = SimpleNamespace(call=PatchCall(config), matching=lambda tokens, ratio: None)
        order = prepared.order_for(backend)  # as in a run
        own = [each if order is None else each.index_select(1, order) for each in (q, k, v)]
        layer = LayerInCall(Projected(*own), state, own[0].flatten(2), Phase(1.0, attention))
        made = attend(attention, layer, own[0].flatten(2), prepared)
        if order is not None:
            made.index_select(1, prepared.inverse)

    def tune(self) -> None:
        """Tune the embedded pipelines with their real weights to 40 dB; what is found and promised."""
        record = self.begin("tune", "none")
        for share, name in ((0.5, "toy"), (1.0, "toy-dit")):
            pipe, begun = load_pipeline(name, device=str(self.device)), time.monotonic()
            pipe.set_progress_bar_config(disable=True)
            small: dict[str, Any] = {"steps": 4, "height": 64, "width": 64, "images": 8} if self.tiny else {}
            small |= dict.fromkeys(("presets", "reuse"), False) if self.tiny else {}
            row: dict[str, Any] = {"method": name}
            try:
                with alarm(share * self.left):
                    tuned = elfatt_sd.tune(pipe, closeness=40, **small)
                row |= {"found": str(tuned), "config": tuned.config.to_dict(), "untouched": tuned.untouched_seconds}
            except (Exception, OutOfTime) as error:
                row["failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            row["taken"] = time.monotonic() - begun
            common.keep_rows(record, {}, [*record.results["rows"], row])

    def graphs(self) -> None:
        """Draw with `elfatt_sd.graphs` and without: times, whether latents are equal, and what it says itself."""
        record = self.begin("graphs", "none")
        rows: list[dict[str, Any]] = []
        for name in ("toy", "sd15"):
            pipeline = self.pipeline(name)
            for method, layout in (("untouched", None), (FAST, None), ("untouched", "channels_last")):
                row: dict[str, Any] = {"model": name, "method": method, "layout": layout or "", "said": []}
                try:
                    self.drawn(pipeline, method, layout, row)
                except Exception as error:
                    row["failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                rows.append(row)
                common.keep_rows(record, {}, list(rows))

    def drawn(self, pipeline: tuple[Any, dict[str, Any]], method: str, layout: Any, row: dict[str, Any]) -> None:
        """Fill a row: a pipeline draws eager, and with graphs."""
        (pipe, inputs), name = pipeline, row["model"]
        steps = 3 if self.tiny else min(own_settings(pipe, name)[0], 15)
        elfatt_sd.remove_patch(pipe)
        if method != "untouched":
            elfatt_sd.apply_patch(pipe, method)

        def draw() -> torch.Tensor:
            generator = torch.Generator().manual_seed(0)
            given = {**inputs, "num_inference_steps": steps, "generator": generator, "output_type": "latent"}
            given |= {"height": 64, "width": 64} if self.tiny else {}
            made: torch.Tensor = pipe(**given).images
            return torch.nan_to_num(made)  # which random weights may give

        eager = draw()
        with ExitStack() as undo:
            undo.enter_context(elfatt_sd.graphs(pipe, layout=layout, say=row["said"].append))
            for _ in range(2):  # captured, and timed by itself
                replayed = draw()
            row["equal"] = torch.equal(eager, replayed)
            row["greatest difference"] = (eager.float() - replayed.float()).abs().max().item()
            own = vars(pipe.unet)["elfatt_graphs"]
            row |= {
                "captured": sum(each is not None for each in own._captured.values()),
                "off": str(own.off or own._why),
            }
            times = {"graphs": [timed(draw, self.device) for _ in range(2)]}
        times["eager"] = [timed(draw, self.device) for _ in range(2)]
        row |= {f"{kind}, seconds": min(each) for kind, each in times.items()}
        row["a step, ms"] = {kind: 1000 * min(each) / steps for kind, each in times.items()}

    def pipeline(self, name: str) -> tuple[Any, dict[str, Any]]:
        """Return a pipeline and its inputs."""
        if name == "toy" or self.tiny:
            pipe, inputs = load_pipeline("toy", device=str(self.device)), {"prompt": "a red star"}
        else:
            pipe, inputs = benchmarking.make_pipeline(name, self.device, pick_dtype("auto", self.device), 1)
        pipe.set_progress_bar_config(disable=True)
        return pipe, inputs

    def tests(self) -> None:
        """Run the tests that need a GPU, as long as there is time."""
        record, which = self.begin("tests", "none"), ["--collect-only"] if self.tiny else []
        quick = ["-k", "not replay_what_every_step", "-v", "--tb=short"]  # the others compile a model each, for minutes
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu/test_kernels.py", *quick, *which]
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": paths}
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(command, cwd=ROOT, env=environment, **options) as process:
            try:
                said, _ = process.communicate(timeout=max(self.left, 1))
            except (subprocess.TimeoutExpired, OutOfTime):
                process.kill()
                said, _ = process.communicate()
        row = {"method": "pytest -m gpu", "ended": process.returncode, "said": said[-3000:]}
        common.keep_rows(record, {}, [row])

    def conclude(self) -> None:
        """Write, and print what failed."""
        self.results["seconds"]["all"] = time.monotonic() - self.start
        self.write()
        for name, error in self.results["errors"].items():
            print(f"\n{name}: {error}")
        print(f"\n{self.results['seconds']['all']:.0f} s; {self.path}")


def main() -> None:
    """Run all parts, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, help=f"folder for {Next.file} (benchmarks/results; with --tiny build/gpu_next)"
    )
    parser.add_argument("--seconds", type=float, default=LIMIT, help="end after this time")
    parser.add_argument("--only", help="parts to run, separated by commas; 'list' shows them")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true", help="small models and sizes, on any machine")
    options = parser.parse_args()
    options.out = options.out or Path("build/gpu_next" if options.tiny else "benchmarks/results")
    suite = Next(options)
    names = list(suite.parts) if options.only is None else options.only.split(",")
    if unknown := [name for name in names if name not in suite.parts]:
        sys.exit("\n".join([f"{unknown[0]!r} is not a part; there are:", *suite.parts]))
    if suite.device.type == "cpu" and not suite.tiny:
        sys.exit("there is no GPU here; --tiny tries the parts on any machine")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))
    try:
        for name in names:
            suite.run(name, suite.parts[name])
    finally:  # also when it is stopped
        suite.conclude()


if __name__ == "__main__":
    main()
