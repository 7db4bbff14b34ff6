"""What the calls of a run keep for one another, and what they share with nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from support import tiny_pipelines as tiny
from support.checks import COLUMNS, ROWS, generator, inputs, with_effect
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import elfatt_sd
import elfatt_sd.runtime.processor as processor_module
from elfatt_sd.config import METHODS, PatchConfig, Phase
from elfatt_sd.errors import ElfattError
from elfatt_sd.families import Given, find_layers
from elfatt_sd.families.base import PlainProjections
from elfatt_sd.runtime.call import LayerCall
from elfatt_sd.runtime.denoiser import KEPT_CALLS
from elfatt_sd.runtime.schedule import Position, Run


@torch.no_grad()
def test_a_matching_is_reused_within_its_phase_alone() -> None:
    """Also where a phase begins amid the steps that share a matching."""
    unet, scheduler, (sample, text) = tiny.unet(), tiny.ddim(), inputs(torch.float32)
    scheduler.set_timesteps(4)
    phases = (Phase(0.25, "softmax", ratio=0.2, stride=4), Phase(1.0, "softmax", ratio=0.5))
    elfatt_sd.apply_patch(unet, PatchConfig("two", phases, reuse_steps=4))
    merged = []
    first: Any = find_layers(unet)[0].attention
    first.to_q.register_forward_hook(lambda _, given, result: merged.append(result.shape[1]))
    for timestep in scheduler.timesteps:
        unet(sample, timestep, text)
    assert merged == [256 - 51, 128, 128, 128]


CORRECTED = [
    Phase(1.0, "sampled", block_size=16, residual_steps=3),
    Phase(1.0, "block", block_size=16, block_order="spread", residual_steps=3),
    Phase(1.0, "elfatt", ratio=0.5, block_size=16, agents=8, residual_steps=3),
]


def around(attention: Any, tokens: Tensor) -> PlainProjections:
    return PlainProjections(attention, tokens)


def corrected(phase: Phase, steps: int = 6) -> tuple[Any, Any]:
    """A UNet patched with one phase, and the timesteps of a run."""
    scheduler = tiny.ddim()
    scheduler.set_timesteps(steps)
    return elfatt_sd.apply_patch(tiny.unet(), PatchConfig("corrected", (phase,))), scheduler.timesteps


@torch.no_grad()
@pytest.mark.parametrize("phase", CORRECTED, ids=lambda phase: phase.attention.name)
def test_a_shared_difference_is_that_of_the_first_step(phase: Phase) -> None:
    """A layer is exact in the first step; then its approximation changes with its input, the difference does not."""
    unet, _ = corrected(phase)
    attention: Any = find_layers(unet)[0].attention
    layer, run, (sample, _), noise = attention.elfatt_state, Run(), inputs(torch.float32), generator()
    draws = []
    for step in range(3):
        tokens = torch.randn(2, ROWS * COLUMNS, attention.query_dim, generator=noise)
        layer.patch.begin(Position(step, 6), run, Given.latent(sample, 0))
        state = layer.state
        result, own = attention(tokens), processor_module.approximate(around(attention, tokens), state, phase, tokens)
        if step == 0:
            difference = AttnProcessor2_0()(attention, tokens) - own
            assert difference.abs().max() > 1e-3, "else this test could not fail"
        torch.testing.assert_close(result, own + difference, atol=1e-5, rtol=0)
        parts = (*(state.split or ()), *vars(state.prepared).values())
        draws.append([part for part in parts if isinstance(part, Tensor)])
    for kinds in zip(*draws, strict=True):
        assert all(drawn is kinds[0] or torch.equal(drawn, kinds[0]) for drawn in kinds)


@torch.no_grad()
def test_differences_are_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every group of steps, in another run, at another size or batch; each layer once."""
    unet, timesteps = corrected(CORRECTED[0])
    measured: list[int] = []
    correct = LayerCall.correct

    def count_exact(state: LayerCall, own: Any, exact: Any) -> Tensor:
        return correct(state, own, lambda rows: (measured.append(state.index), exact(rows))[1])

    monkeypatch.setattr(LayerCall, "correct", count_exact)
    sample, text = inputs(torch.float32)

    def count(steps: Any, sample: Tensor = sample, text: Tensor = text) -> list[int]:
        counts = []
        for timestep in steps:
            unet(sample, timestep, text)
            counts.append(len(measured))
            measured.clear()
        return counts

    assert count(timesteps) == [3, 0, 0, 3, 0, 0]
    assert count(timesteps[:2]) == [3, 0]
    assert count(timesteps[:2]) == [3, 0], "a run that was broken off leaves nothing"
    assert count(timesteps[1:2], sample[..., :8]) == [3]
    assert count(timesteps[1:3], sample[:1], text[:1]) == [3, 0]


def test_calls_of_one_step_have_differences_of_their_own() -> None:
    """Guidance may call the UNet once with the prompt and once without."""
    unet, timesteps = corrected(CORRECTED[0])
    sample, text = inputs(torch.float32)
    texts = (text, torch.zeros(2, 5, tiny.TEXT_WIDTH))
    alone = [[unet(sample, timestep, each).sample for timestep in timesteps] for each in texts]
    turns = [[unet(sample, timestep, each).sample for each in texts] for timestep in timesteps]
    assert all(torch.equal(turns[step][each], alone[each][step]) for each in range(2) for step in range(len(timesteps)))


@torch.no_grad()
@pytest.mark.parametrize(
    "config",
    [
        PatchConfig("corrected", (CORRECTED[0],)),
        PatchConfig("matched", (Phase(1.0, ratio=0.5),), reuse_steps=3),
    ],
    ids=lambda config: config.method,
)
def test_views_of_one_step_keep_their_own(config: PatchConfig) -> None:
    """A panorama calls the UNet once for each view, with the same prompt; so may a pipeline with extra guidance."""
    unet, scheduler = elfatt_sd.apply_patch(tiny.unet(), config), tiny.ddim()
    scheduler.set_timesteps(6)
    (sample, text), noise = inputs(torch.float32), generator()
    views = [sample, torch.randn(sample.shape, generator=noise), torch.randn(2, 4, 8, 16, generator=noise)]
    alone = [[unet(view, timestep, text).sample for timestep in scheduler.timesteps] for view in views]
    for step, timestep in enumerate(scheduler.timesteps):
        for view, expected in zip(views, alone, strict=True):
            assert torch.equal(unet(view, timestep, text).sample, expected[step])


@torch.no_grad()
def test_parts_of_a_layers_input_keep_their_own() -> None:
    """Within one call, diffusers can give a video's frames to a layer in parts, the last of them smaller."""
    unet, _ = corrected(CORRECTED[0])
    attention: Any = find_layers(unet)[0].attention
    layer, run, (sample, _), noise = attention.elfatt_state, Run(), inputs(torch.float32), generator()
    parts = [torch.randn(size, ROWS * COLUMNS, attention.query_dim, generator=noise) for size in (2, 2, 1)]
    layer.patch.begin(Position(0, 6), run, Given.latent(sample, 0))
    state, differences = layer.state, []
    for tokens in parts:
        exact = AttnProcessor2_0()(attention, tokens)
        torch.testing.assert_close(attention(tokens), exact, atol=1e-5, rtol=0)
        differences.append(exact - processor_module.approximate(around(attention, tokens), state, CORRECTED[0], tokens))
    layer.patch.begin(Position(1, 6), run, Given.latent(sample, 0))
    state = layer.state
    for tokens, difference in zip(parts, differences, strict=True):
        own = processor_module.approximate(around(attention, tokens), state, CORRECTED[0], tokens)
        torch.testing.assert_close(attention(tokens), own + difference, atol=1e-5, rtol=0)


def test_calls_on_no_schedule_share_nothing() -> None:
    """Numbers in a loop of one's own may be those of score distillation: each is exact, and that is said once.

    As a preview between two steps, such a call does not end their run.
    """
    (unet, timesteps), (sample, text) = corrected(CORRECTED[0]), inputs(torch.float32)
    exact = {number: tiny.unet()(sample, number, text).sample for number in (960, 920, 100)}
    alone = [unet(sample, timestep, text).sample for timestep in timesteps]
    with pytest.warns(UserWarning, match="on no schedule: they are exact") as warned:
        for timestep, expected in zip(timesteps, alone, strict=True):
            assert torch.equal(unet(sample, timestep, text).sample, expected)
            for number, found in exact.items():
                torch.testing.assert_close(unet(sample, number, text).sample, found, atol=1e-5, rtol=0)
    assert len(warned) == 1
    with pytest.raises(ElfattError, match="not known, and the patch keeps something from step to step"):
        unet(sample, torch.tensor([10, 900]), text)


@torch.no_grad()
def test_nothing_is_computed_for_steps_that_never_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The difference of a step without a follower in its group is of no use."""
    unet, timesteps = corrected(CORRECTED[0], steps=7)
    (sample, text), calls = inputs(torch.float32), []
    approximate = processor_module.approximate

    def count(attn: Any, state: Any, phase: Phase, tokens: Tensor) -> Tensor:
        calls.append(phase.attention.name)
        return approximate(attn, state, phase, tokens)

    monkeypatch.setattr(processor_module, "approximate", count)
    for timestep in timesteps:
        unet(sample, timestep, text)
    layers = 3
    assert calls.count("sampled") == 6 * layers
    assert calls.count("softmax") == 3 * layers


@torch.no_grad()
@pytest.mark.parametrize("method", [m for m in METHODS if m != "sd"])
def test_a_default_device_is_not_that_of_the_draws(method: str) -> None:
    """As after `torch.set_default_device("cuda")`: what is drawn and worked out on the host stays there."""
    unet = elfatt_sd.apply_patch(tiny.unet(), method)
    sample, text = inputs(torch.float32)
    timesteps = torch.tensor([999, 700, 100])
    expected = [unet(sample, timestep, text).sample for timestep in timesteps]
    with torch.device("meta"):
        found = [unet(sample, timestep, text).sample for timestep in timesteps]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@torch.no_grad()
def test_a_call_that_is_repeated_takes_nothing_over() -> None:
    """As in a loop of the user's own; and what such calls keep does not grow for ever."""
    unet, timesteps = corrected(CORRECTED[0])
    denoiser = find_layers(unet)[0].attention.elfatt_state.patch  # type: ignore[union-attr]
    sample, text = inputs(torch.float32)
    exact = unet(sample, timesteps[0], text).sample
    for _ in range(KEPT_CALLS + 3):
        assert torch.equal(unet(sample, timesteps[0], text).sample, exact)
    shelves = denoiser.latest.memory.residuals.values()
    assert {len(shelf.kept) for shelf in shelves} == {KEPT_CALLS}
    assert not torch.equal(unet(sample, timesteps[1], text).sample, exact)


def test_no_difference_outlives_its_run() -> None:
    """What decodes the latents finds the memory free; gradients do not reach back to an earlier step."""
    unet, timesteps = corrected(CORRECTED[0])
    denoiser = find_layers(unet)[0].attention.elfatt_state.patch  # type: ignore[union-attr]
    sample, text = inputs(torch.float32)
    held = []
    for timestep in timesteps:
        unet(sample, timestep, text).sample.sum().backward()
        kept = [one.values for layer in denoiser.layers for one in layer.latest.residuals.values()]
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
    unet, scheduler = tiny.unet(), tiny.ddim()
    elfatt_sd.apply_patch(unet, method, **with_effect(method, reuse_steps=2))
    scheduler.set_timesteps(5)
    sample, text = inputs(torch.float32)
    with torch.no_grad(), Waits() as waits:
        for timestep in scheduler.timesteps:
            unet(sample, timestep, text)
    assert waits.seen == []
    with Waits() as waits:
        assert sample.max().item() > 0
    assert waits.seen == ["_local_scalar_dense"]
