"""CUDA graphs, on a stand-in for them (`support.recorded`)."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from peft import LoraConfig
from support import checks, tiny_transformers
from support import tiny_pipelines as tiny
from support.checks import Recorded
from torch import nn

import elfatt_sd
from elfatt_sd import ElfattError, PatchConfig, Phase, StepReuse
from elfatt_sd.runtime import graphs as own
from elfatt_sd.runtime.denoiser import GRAPHS
from elfatt_sd.runtime.layout import NormForward


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Recorded]]:
    """The stand-in, and graphs that stay on whatever they give."""
    monkeypatch.setitem(own.CAPTURES, "cpu", Recorded)
    monkeypatch.setattr(own, "PAYS", 0.0)
    Recorded.made.clear()
    yield Recorded.made


def silent(text: str) -> None:
    assert text.endswith("graphs are on.")


def reusing(cut: str, **phase: Any) -> PatchConfig:
    return PatchConfig("reusing", (Phase(1.0, **phase),) if phase else (), reuse=(StepReuse(cut=cut, first=2, last=1),))


SMALL = {"block_size": 16, "agents": 8}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "untouched": (None, {}),
    **{method: (method, SMALL) for method in ("elfatt", "elfatt-fast", "elfatt-quality")},
    "fp8": ("elfatt-quality", {**SMALL, "residuals": "fp8"}),
    "a difference for both rows": ("tome", {"residual_steps": 3}),
    "a matching for two steps": ("tome", {"reuse_steps": 2}),
    "a matching for layers": ("agent", {"reuse_layers": True}),
    "reuse": (reusing("shallow-1"), {}),
    "reuse with sampled keys": (reusing("shallow-1", attention="sampled", keys=8), {}),
    "the whole output": (reusing("output"), {}),
}


def patched(pipe: Any, case: str) -> Any:
    method, settings = CASES[case]
    if method is None:
        return nullcontext()
    wanted = checks.with_effect(method, **settings) if isinstance(method, str) else settings
    return elfatt_sd.patched(pipe, method, **wanted)


@pytest.mark.parametrize("case", CASES)
def test_latents_are_those_of_the_eager_run_bit_for_bit(pipe: Any, case: str, recorded: list[Recorded]) -> None:
    """In two runs, of which the second replays alone, and in another size between them."""
    pipe.scheduler = tiny.ddim()
    runs = [checks.runner(pipe, num_inference_steps=8, guidance_scale=3.0, height=side, width=32) for side in (32, 48)]
    with patched(pipe, case):
        eager = [run() for run in (runs[0], runs[1], runs[0])]
        with elfatt_sd.graphs(pipe, say=silent):
            replayed = [run() for run in (runs[0], runs[1], runs[0])]
            held = len(recorded)
            again = runs[0]()
        assert all(map(torch.equal, replayed, eager)) and torch.equal(again, eager[0])
        assert torch.equal(runs[0](), eager[0]), "taken back"
    assert 2 <= held == len(recorded), "a third run captures nothing"
    assert len({graph.pool for graph in recorded}) == 1
    assert all(graph.replays for graph in recorded)


@pytest.mark.parametrize("cut", ["", "blocks-1-0"])
def test_transformers_of_text_and_image(folder: Path, cut: str, recorded: list[Recorded]) -> None:
    pipe = tiny_transformers.flux(folder)
    run = checks.runner(pipe, num_inference_steps=6, height=32, width=32)
    phase = {"attention": "sampled", "keys": 8}
    elfatt_sd.apply_patch(pipe, reusing(cut, **phase) if cut else PatchConfig("sampled", (Phase(1.0, **phase),)))
    eager = run()
    with elfatt_sd.graphs(pipe, say=silent):
        assert all(torch.equal(run(), eager) for _ in range(2))
    assert recorded


def test_a_lora_and_weights_that_move_are_captured_again(folder: Path, recorded: list[Recorded]) -> None:
    pipe = tiny.sd15(folder, scheduler=tiny.ddim())
    run = checks.runner(pipe)
    elfatt_sd.graphs(pipe, say=silent)
    changes = (
        lambda: pipe.unet.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=["to_q"], init_lora_weights=False)),
        lambda: pipe.unet.set_adapters(["default"], [0.5]),
        lambda: pipe.unet.double().float(),
        lambda: pipe.unet.conv_in.weight.data.mul_(1.5),  # where it was: there is nothing to capture
    )
    run()
    for change, captured in zip(changes, (1, 1, 1, 0), strict=True):
        change()
        before = len(recorded)
        found = run()
        assert len(recorded) == before + captured
        twin = copy.deepcopy(pipe)
        elfatt_sd.remove_graphs(twin)
        assert torch.equal(found, checks.runner(twin)())


@pytest.mark.parametrize("order", ["patch, graphs", "graphs, patch"])
@pytest.mark.parametrize("first", ["patch", "graphs"])
def test_what_was_changed_is_put_back_in_any_order(pipe: Any, order: str, first: str) -> None:
    reuse = reusing("output", attention="sampled", keys=8)
    put = {"patch": lambda: elfatt_sd.apply_patch(pipe, reuse), "graphs": lambda: elfatt_sd.graphs(pipe, say=silent)}
    taken = {"patch": elfatt_sd.remove_patch, "graphs": elfatt_sd.remove_graphs}
    before = {name: set(vars(each)) for name, each in pipe.unet.named_modules()}
    run = checks.runner(pipe)
    untouched = run()
    for name in order.split(", "):
        put[name]()
    patched = run()
    for name in sorted(taken, key=lambda name: name != first):
        taken[name](pipe)
        assert torch.equal(run(), untouched if name == "patch" or first == "patch" else patched)
    assert {name: set(vars(each)) for name, each in pipe.unet.named_modules()} == before


def test_copies_and_pickles_have_graphs_of_their_own(recorded: list[Recorded]) -> None:
    unet = tiny.unet()
    elfatt_sd.graphs(unet)
    eager = checks.denoise(unet, 3)
    for twin in (copy.deepcopy(unet), pickle.loads(pickle.dumps(unet))):
        captured = len(recorded)
        assert torch.equal(checks.denoise(twin, 3), eager) and len(recorded) == captured + 1
        assert vars(twin)[GRAPHS].module is twin
        elfatt_sd.remove_graphs(twin)
        assert "forward" not in vars(twin)


def test_both_ways_are_timed_in_the_first_run(monkeypatch: pytest.MonkeyPatch, recorded: list[Recorded]) -> None:
    """Eager and replayed in turn, from the call behind the capture on; below the limit nothing is held any more."""
    said: list[str] = []
    monkeypatch.setattr(own, "PAYS", 1.03)
    for faster, words in ((1.5, "1.50 times as fast; graphs are on."), (1.02, "1.02 times as fast; graphs are off.")):
        unet = tiny.unet()
        elfatt_sd.graphs(unet, say=said.append)
        checks.set_clock(monkeypatch, [faster, 1.0] * own.ROUNDS)
        checks.denoise(unet, 8)
        assert said.pop().endswith(words) and said == []
        replays = recorded[-1].replays
        assert replays == 1 + own.ROUNDS
        checks.denoise(unet, 2)
        assert (recorded[-1].replays == replays + 2) == (faster > 1.03)
        assert bool(vars(unet)[GRAPHS]._buffers) == (faster > 1.03)


def cached(unet: Any) -> None:
    unet.mid_block.forward = lambda *given, **options: type(unet.mid_block).forward(unet.mid_block, *given, **options)
    unet.mid_block.forward.__module__ = "DeepCache.extension"


REFUSED = {
    "a cache decides call by call": cached,
    "its weights are on meta; graphs need one GPU": lambda unet: unet.to("meta"),
    "hooks of accelerate or diffusers are on it": lambda unet: accelerate.cpu_offload(unet, torch.device("cpu")),
    "mode='reduce-overhead' has graphs of its own": lambda unet: unet.mid_block.compile(backend="eager"),
    "residuals='host' keeps": lambda unet: elfatt_sd.apply_patch(unet, "elfatt-quality", residuals="host"),
    "conv_out has a hook or a forward of somebody else's": lambda unet: unet.conv_out.register_forward_hook(print),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_refused(why: str) -> None:
    unet = tiny.unet()
    REFUSED[why](unet)
    with pytest.raises(ElfattError, match=f"^CUDA graphs are not accepted for UNet2DConditionModel: .*{why}.*[^\n]$"):
        elfatt_sd.graphs(unet)
    assert GRAPHS not in vars(unet)
    accelerate.hooks.remove_hook_from_module(unet, recurse=True)  # old versions of diffusers share activations
    with pytest.raises(ElfattError, match="layout='nchw' is not known"):
        elfatt_sd.graphs(tiny.unet(), layout="nchw")  # type: ignore[arg-type]


def another_thread(unet: Any) -> None:
    def call(*_: Any) -> None:
        handle.remove()
        thread = threading.Thread(target=checks.denoise, args=(unet, 1))
        thread.start()
        thread.join()

    handle = unet.conv_in.register_forward_hook(call)


COMPUTED = {
    "gradients are on": lambda unet: [unet(*checks.inputs(torch.float32)[:1], 5, checks.inputs(torch.float32)[1])],
    "autocast is on": lambda unet: torch.autocast("cpu", torch.bfloat16)(checks.denoise)(unet, 3),
    "conv_out has a hook": lambda unet: (unet.conv_out.register_forward_hook(lambda *_: None), checks.denoise(unet, 3)),
    "another thread is within a call": lambda unet: (another_thread(unet), checks.denoise(unet, 3)),
    "could not be captured": lambda unet: (read_by(unet.conv_in), checks.denoise(unet, 3)),
}


def read_by(layer: Any) -> None:
    layer.forward = lambda given: type(layer).forward(layer, given) if given.sum().item() else given


@pytest.mark.parametrize("why", COMPUTED)
def test_what_is_computed_without(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one warning for all calls, and what the call gives without graphs."""
    unet = tiny.unet()
    eager = checks.denoise(unet, 3)
    elfatt_sd.graphs(unet, say=silent)
    if why in ("could not be captured", "another thread is within a call"):  # which hooks bring about here
        monkeypatch.setattr(own, "obstacle_to", lambda module: "")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        COMPUTED[why](unet)
    assert [why in str(each.message) for each in seen if "CUDA graphs are not used" in str(each.message)] == [True]
    assert torch.equal(checks.denoise(unet, 3), eager)


def test_channels_last_with_norms_of_its_own_is_taken_back_exactly() -> None:
    unet = tiny.unet()
    eager = checks.denoise(unet, 4)
    before = {name: (weight, weight.stride(), weight.clone()) for name, weight in unet.named_parameters()}
    held = {name: set(vars(each)) for name, each in unet.named_modules()}
    silu = unet.conv_act
    elfatt_sd.graphs(unet, layout="channels_last", say=silent)
    norms = [part.forward for part in unet.modules() if isinstance(part, nn.GroupNorm)]
    assert all(isinstance(norm, NormForward) for norm in norms)
    blocks = [part for part in unet.modules() if type(part).__name__ == "ResnetBlock2D"]
    assert sum(norm.silu for norm in norms) == 1 + 2 * len(blocks) < len(norms)
    assert unet.conv_in.weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(checks.denoise(unet, 4), eager, atol=1e-4, rtol=1e-4)
    elfatt_sd.remove_graphs(unet)
    for name, weight in unet.named_parameters():
        assert weight is before[name][0] and weight.stride() == before[name][1] and torch.equal(weight, before[name][2])
    assert {name: set(vars(each)) for name, each in unet.named_modules()} == held and unet.conv_act is silu
    assert torch.equal(checks.denoise(unet, 4), eager)
