"""What calls keep for one another, and layers with phases of their own."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from support import tiny_pipelines as tiny
from support import tiny_transformers
from support.checks import COLUMNS, ROWS, generator, inputs, runner, with_effect
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import elfatt_sd
import elfatt_sd.runtime.processor as processor_module
from elfatt_sd.config import EXACT, METHODS, LayerPhases, PatchConfig, Phase
from elfatt_sd.errors import ElfattError
from elfatt_sd.families import Given, find_layers, main_denoiser
from elfatt_sd.families.base import PlainProjections
from elfatt_sd.runtime.call import LayerCall
from elfatt_sd.runtime.denoiser import KEPT_CALLS
from elfatt_sd.runtime.schedule import Position, Run


def begun(config: Any = None, steps: int = 6) -> tuple[Any, Tensor, tuple[Tensor, Tensor], Any]:
    """A patched UNet, the timesteps of a run, its input and text, and its first layer."""
    scheduler, config = tiny.ddim(), config or PatchConfig("corrected", (SAMPLED,))
    scheduler.set_timesteps(steps)
    unet = elfatt_sd.apply_patch(tiny.unet(), config)
    return unet, scheduler.timesteps, inputs(torch.float32), find_layers(unet)[0].attention


@torch.no_grad()
def test_a_matching_is_reused_within_its_phase_alone() -> None:
    """Also where a phase begins amid the steps that share a matching."""
    phases = (Phase(0.25, "softmax", ratio=0.2, stride=4), Phase(1.0, "softmax", ratio=0.5))
    unet, timesteps, (sample, text), attention = begun(PatchConfig("two", phases, reuse_steps=4), 4)
    merged = list[int]()
    attention.to_q.register_forward_hook(lambda _, given, result: merged.append(result.shape[1]))
    for timestep in timesteps:
        unet(sample, timestep, text)
    assert merged == [256 - 51, 128, 128, 128]


SAMPLED = Phase(1.0, "sampled", block_size=16, residual_steps=3)
CORRECTED = [
    SAMPLED,
    Phase(1.0, "block", block_size=16, block_order="spread", residual_steps=3),
    Phase(1.0, "elfatt", ratio=0.5, block_size=16, agents=8, residual_steps=3),
]


def approximated(attention: Any, tokens: Tensor, phase: Phase) -> Tensor:
    state = attention.elfatt_state.state
    output = processor_module.approximate(PlainProjections(attention, tokens), state, phase, tokens)
    state.candidates = None  # as a processor leaves it
    return output


@torch.no_grad()
@pytest.mark.parametrize("sizes", [(2,), (2, 2, 1)], ids=["whole", "parts"])
@pytest.mark.parametrize("phase", CORRECTED, ids=lambda phase: phase.attention.name)
def test_a_shared_difference_is_that_of_the_first_step(phase: Phase, sizes: tuple[int, ...]) -> None:
    """A layer is exact in the first step; then its approximation changes with its input, the difference does not.

    Within a call, diffusers can give a video's frames to a layer in parts, the last of them smaller.
    """
    _, _, (sample, _), attention = begun(PatchConfig("corrected", (phase,)))
    layer, run, noise = attention.elfatt_state, Run(), generator()
    draws, differences = [], list[Tensor]()
    for step in range(3):
        layer.patch.begin(Position(step, 6), run, Given.latent(sample, 0))
        for part, size in enumerate(sizes):
            tokens = torch.randn(size, ROWS * COLUMNS, attention.query_dim, generator=noise)
            result, own = attention(tokens), approximated(attention, tokens, phase)
            if step == 0:
                differences.append(AttnProcessor2_0()(attention, tokens) - own)
                assert differences[part].abs().max() > 1e-3, "else this test could not fail"
            torch.testing.assert_close(result, own + differences[part], atol=1e-5, rtol=0)
        parts = (*(layer.state.split or ()), *vars(layer.state.prepared).values())
        draws.append([each for each in parts if isinstance(each, Tensor)])
    for kinds in zip(*draws, strict=True):
        assert all(drawn is kinds[0] or torch.equal(drawn, kinds[0]) for drawn in kinds)


@torch.no_grad()
def test_differences_are_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every group of steps, in another run, at another size or batch; each layer once, and not for no other step."""
    unet, timesteps, (sample, text), _ = begun(steps=7)
    measured, correct = list[int](), LayerCall.correct

    def count_exact(state: LayerCall, own: Any, exact: Any) -> Tensor:
        return correct(state, own, lambda rows: (measured.append(state.index), exact(rows))[1])

    monkeypatch.setattr(LayerCall, "correct", count_exact)

    def count(steps: Any, sample: Tensor = sample, text: Tensor = text) -> list[int]:
        ends = [0]
        measured.clear()
        for timestep in steps:
            unet(sample, timestep, text)
            ends.append(len(measured))
        return [after - before for before, after in itertools.pairwise(ends)]

    assert count(timesteps) == [3, 0, 0, 3, 0, 0, 3]
    assert count(timesteps[:2]) == [3, 0]
    assert count(timesteps[:2]) == [3, 0], "a run that was broken off leaves nothing"
    assert count(timesteps[1:2], sample[..., :8]) == [3]
    assert count(timesteps[1:3], sample[:1], text[:1]) == [3, 0]
    computed, approximate = Counter[str](), processor_module.approximate

    def count_calls(given: Any, state: Any, phase: Phase, tokens: Tensor) -> Tensor:
        computed[phase.attention.name] += 1
        return approximate(given, state, phase, tokens)

    monkeypatch.setattr(processor_module, "approximate", count_calls)
    count(timesteps)
    assert computed == {"sampled": 3 * 6, "softmax": 3 * 3}, "the last step's difference is of no use"


@torch.no_grad()
@pytest.mark.parametrize(
    "config",
    [PatchConfig("corrected", (SAMPLED,)), PatchConfig("matched", (Phase(1.0, ratio=0.5),), reuse_steps=3)],
    ids=lambda config: config.method,
)
def test_calls_of_one_step_keep_their_own(config: PatchConfig) -> None:
    """A panorama calls the UNet once for each view; guidance may call it once with the prompt and once without."""
    (unet, timesteps, (sample, text), _), noise = begun(config), generator()
    views = [(sample, text), (sample, torch.zeros_like(text))]
    views += [(torch.randn(2, 4, rows, 16, generator=noise), text) for rows in (16, 8)]
    alone = [[unet(view, timestep, each).sample for timestep in timesteps] for view, each in views]
    for step, timestep in enumerate(timesteps):
        for (view, each), expected in zip(views, alone, strict=True):
            assert torch.equal(unet(view, timestep, each).sample, expected[step])


def test_calls_on_no_schedule_share_nothing() -> None:
    """Numbers in a loop of one's own may be those of score distillation: each is exact, and that is said once.

    As a preview between two steps, such a call does not end their run.
    """
    unet, timesteps, (sample, text), _ = begun()
    exact = {number: tiny.unet()(sample, number, text).sample for number in (960, 100)}
    alone = [unet(sample, timestep, text).sample for timestep in timesteps]
    with pytest.warns(UserWarning, match="on no schedule: they are exact") as warned:
        for timestep, expected in zip(timesteps, alone, strict=True):
            assert torch.equal(unet(sample, timestep, text).sample, expected)
            for number, found in exact.items():
                torch.testing.assert_close(unet(sample, number, text).sample, found, atol=1e-5, rtol=0)
    assert len(warned) == 1
    with pytest.raises(ElfattError, match="step of this call is not known"):
        unet(sample, torch.tensor([10, 900]), text)


@torch.no_grad()
def test_a_call_that_is_repeated_takes_nothing_over() -> None:
    """As in a loop of the user's own; and what such calls keep does not grow for ever."""
    unet, timesteps, (sample, text), attention = begun()
    exact = unet(sample, timesteps[0], text).sample
    for _ in range(KEPT_CALLS + 3):
        assert torch.equal(unet(sample, timesteps[0], text).sample, exact)
    kept = attention.elfatt_state.patch.latest.memory.residuals.values()
    assert {len(each.kept) for each in kept} == {KEPT_CALLS}
    assert not torch.equal(unet(sample, timesteps[1], text).sample, exact)


def test_no_difference_outlives_its_run() -> None:
    """What decodes the latents finds the memory free; gradients do not reach back to an earlier step."""
    (unet, timesteps, (sample, text), attention), held = begun(), list[int]()
    for timestep in timesteps:
        unet(sample, timestep, text).sample.sum().backward()
        layers = attention.elfatt_state.patch.layers
        kept = [one.values for layer in layers for one in layer.latest.residuals.values()]
        assert not any(tensor.requires_grad for tensor in kept)
        held.append(len(kept))
    assert held == [3, 3, 3, 3, 3, 0]


class Waits(TorchDispatchMode):
    """Collects the operations for whose result the host would have to wait on an accelerator."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name in ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "_unique2", "equal"):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", METHODS)
def test_no_call_waits_for_the_device(method: str) -> None:
    config = PatchConfig.preset(method, **with_effect(method, reuse_steps=2))  # type: ignore[arg-type]
    unet, timesteps, (sample, text), _ = begun(config, 5)
    with torch.no_grad(), Waits() as waits:
        for timestep in timesteps:
            unet(sample, timestep, text)
        assert waits.seen == []
        assert sample.max().item() > 0
    assert waits.seen == ["_local_scalar_dense"]


# Layers with phases of their own.

CALLS = 5  # of the UNet for the four steps of PNDM
KEYS = Phase(1.0, "sampled", keys=8)
BLOCKS = Phase(0.5, "block", block_size=16, block_order="windows")


def own(*phases: tuple[str, tuple[Phase, ...]]) -> PatchConfig:
    return PatchConfig("own", per_layer=tuple(LayerPhases(*each) for each in phases))


def test_each_layer_has_its_own_phases(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pattern counts; one that names no layer is refused. The same phases by layer are the same latents."""
    first, *others = [layer.name for layer in find_layers(pipe.unet) if layer.downsample == 1]
    seen: dict[str, list[str]] = {}
    begin = LayerCall.begin

    def note(state: LayerCall, phase: Phase, step: int, *given: Any) -> bool:
        seen.setdefault(state.layer.name, []).append(phase.attention.name)
        return begin(state, phase, step, *given)

    late = (Phase(0.5), Phase(1.0, "block", block_size=16, block_order="windows"))
    config = PatchConfig("own", levels=1, per_layer=(LayerPhases(first, (KEYS,)), LayerPhases("*", late)))
    with monkeypatch.context() as noting, elfatt_sd.patched(pipe, config):
        noting.setattr(LayerCall, "begin", note)
        runner(pipe)()
    assert seen.pop(first) == ["sampled"] * CALLS
    assert seen and all(each == ["softmax"] * 3 + ["block"] * 2 for each in seen.values()) and set(others) <= set(seen)
    for phases in ((BLOCKS, KEYS), (Phase(1.0, "sampled", keys=8, residual_steps=2),)):
        with elfatt_sd.patched(pipe, PatchConfig("whole", phases)) as plan:
            expected = runner(pipe)()
        with elfatt_sd.patched(pipe, own(*((each.name, phases) for each in plan.layers if each.patched))) as same:
            assert torch.equal(runner(pipe)(), expected)
        assert [layer.reason for layer in same.layers if layer.patched] == [
            layer.reason for layer in plan.layers if layer.patched
        ]
    with pytest.raises(ElfattError, match=r"no self-attention layer matches layers='nowhere\.\*'; this UNet has "):
        elfatt_sd.apply_patch(pipe, own(("nowhere.*", (KEYS,))))
    elfatt_sd.apply_patch(pipe, own(("*", (EXACT,))))
    assert not elfatt_sd.is_patched(pipe), "exact phases alone change nothing"


@pytest.mark.parametrize("family", ["unet", "sd3"])
def test_the_output_of_an_earlier_step_is_used_again(pipe: Any, family: str) -> None:
    """In every second step the layer is not called for attention at all."""
    pipe, run = (pipe, runner(pipe)) if family == "unet" else tiny_transformers.sd3()
    layer, projected, untouched = find_layers(main_denoiser(pipe))[0], Counter[str](), run()
    handle = layer.attention.to_q.register_forward_hook(lambda *_: projected.update(["q"]))
    with elfatt_sd.patched(pipe, own((layer.name, (Phase(1.0, "reuse", residual_steps=2),)))):
        assert not torch.equal(run(), untouched)
    handle.remove()
    assert family != "unet" or projected.total() == 3
    assert torch.equal(run(), untouched)
