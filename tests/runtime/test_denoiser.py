"""What is installed on a model: processors that come and go, copies, what a call leaves behind, and its step."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, ClassVar

import diffusers
import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from support import checks
from support import tiny_pipelines as tiny
from support.checks import TWO_PHASES, counting, elfatt_processors, picture_of, processors, recorded, scheduler, steps

import elfatt_sd
from elfatt_sd.benchmarking.variants import forget_residuals, patched_layers
from elfatt_sd.errors import ElfattError
from elfatt_sd.measure import peak_memory
from elfatt_sd.runtime import processor as processor_module
from elfatt_sd.runtime.denoiser import Patch
from elfatt_sd.runtime.processor import ElfattProcessor
from elfatt_sd.runtime.schedule import Position


def test_a_layer_that_is_called_alone_or_has_no_patch_is_exact(pipe: Any) -> None:
    layer, tokens = pipe.unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1, torch.randn(1, 100, 16)
    mask, exact = torch.zeros(1, 1, 100).index_fill(2, torch.arange(50), -10000.0), layer(tokens)
    masked = layer(tokens, attention_mask=mask)
    elfatt_sd.apply_patch(pipe.unet, "elfatt", active_fraction=1.0)
    with pytest.warns(UserWarning, match="attn1 stays exact: it is called without the hooks of its patched model"):
        assert torch.equal(layer(tokens, attention_mask=mask), masked) and torch.equal(layer(tokens), exact)
    elfatt_sd.remove_patch(pipe.unet)
    assert torch.equal(ElfattProcessor()(layer, tokens), exact)


class Scaled(AttnProcessor2_0):
    """A processor that is not known to be plain attention, and takes an argument of its own in every step."""

    given: ClassVar[list[Any]] = []

    def __call__(self, attn: Any, hidden_states: Any, encoder_hidden_states=None, attention_mask=None, strength=None):  # type: ignore[no-untyped-def,override]
        Scaled.given.append((encoder_hidden_states is None, strength))
        return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask)


def test_displaced_processors_are_reported_once(pipe: Any) -> None:
    """Others see the original ones, and may save, reset and put them back, also when the patch is gone."""
    before = processors(pipe)
    elfatt_sd.apply_patch(pipe, "elfatt")
    patched, plain = picture_of(pipe), dict(pipe.unet.attn_processors)
    assert {*map(type, plain.values())} == {*map(type, before.values())}
    pipe.unet.set_attn_processor(Scaled())
    said = r"3 patched layers now have another attention processor \(Scaled\), the first is down_blocks\.0.*attn1;"
    with pytest.warns(UserWarning, match=said), recorded() as calls:
        displaced = picture_of(pipe)
    assert not calls
    assert torch.equal(picture_of(pipe), displaced)  # no second warning: warnings are errors here
    pipe.unet.set_attn_processor(dict(plain))
    assert torch.equal(picture_of(pipe), patched), "plain attention is back, and the method with it"
    pipe.unet.set_default_attn_processor()
    torch.testing.assert_close(picture_of(pipe), patched, atol=1e-4, rtol=0)
    pipe.unet.set_attn_processor(dict(plain))
    elfatt_sd.remove_patch(pipe)
    assert all(processors(pipe)[name] is old for name, old in before.items())
    elfatt_sd.apply_patch(pipe, "elfatt")
    pipe.unet.set_attn_processor(Scaled())
    elfatt_sd.remove_patch(pipe)
    left = processors(pipe)
    pipe.unet.set_attn_processor(dict(plain))
    assert all(isinstance(each, Scaled) for name, each in left.items()), "not what was there before"
    assert not elfatt_processors(pipe.unet)


def test_other_processors_are_left_alone_or_taken_over_by_name(folder: Path) -> None:
    """What is taken over gets the arguments that it names in exact steps."""
    pipe = tiny.sd15(folder, scheduler=tiny.ddim())
    before = pipe.unet.attn_processors
    pipe.unet.set_attn_processor({name: Scaled() if "attn1" in name else old for name, old in before.items()})
    scaled, options = processors(pipe), {"steps": 5, "cross_attention_kwargs": {"strength": 7}}
    untouched = picture_of(pipe, **options)

    def patch(**given: Any) -> None:
        elfatt_sd.apply_patch(pipe, "elfatt-fast", levels=1, **given)

    with pytest.warns(UserWarning, match="3 layers are left alone, the first is .* Scaled, is not known"):
        patch()
    assert torch.equal(picture_of(pipe, **options), untouched)
    with pytest.warns(UserWarning, match=r"Give take_over=\[...\] with the class names \(Scaled\) to replace"):
        patch(take_over=["Scald"])
    assert "Scaled" in elfatt_sd.plan(pipe, "elfatt-fast", levels=1).layers[0].reason
    for given in ("Scaled", [Scaled], ["Scaled"]):
        patch(take_over=given)
        assert len(elfatt_processors(pipe.unet)) == 3
    Scaled.given.clear()
    assert not torch.equal(picture_of(pipe, **options), untouched)
    assert Scaled.given == [(True, 7)] * (5 * sum(name.endswith("attn1.processor") for name in before) - 4 * 3)
    elfatt_sd.remove_patch(pipe)
    assert all(processors(pipe)[name] is old for name, old in scaled.items())


@pytest.mark.filterwarnings("ignore:.*approximates no step of this run, which begins with step 1000")
@pytest.mark.parametrize(("method", "step"), [("tome", 0), ("elfatt-quality", 0), ("elfatt-quality", 999)])
def test_a_patched_call_needs_no_more_memory_than_it_keeps(method: str, step: int) -> None:
    """Beyond a percent, for what was drawn: positions of samples, blocks and destinations."""
    unet, cpu = tiny.unet(), torch.device("cpu")
    sample, text = torch.randn(2, 4, 32, 32), torch.randn(2, 5, tiny.TEXT_WIDTH)
    call = torch.no_grad()(functools.partial(unet, sample, torch.arange(999, -1, -1)[step], text))
    call()
    untouched = peak_memory(call, cpu)
    assert untouched
    elfatt_sd.apply_patch(unet, method)
    call()
    forget_residuals(unet)
    peak = peak_memory(call, cpu)
    states = [layer.patch.latest.states[layer.index] for layer in patched_layers(unet)]
    kept = sum(one.values.nbytes for state in states for one in state.residuals.values())
    assert bool(kept) == (method == "elfatt-quality" and step == 0), "given back in the last step"
    assert (peak or 0) <= 1.01 * untouched + kept


def test_a_call_leaves_no_tokens_behind_where_memory_ran_out(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another call would need it."""

    def run_out(*_: Any) -> None:
        held.extend(layer.latest for layer in patched_layers(pipe.unet) if layer.latest.block_input is not None)
        raise torch.OutOfMemoryError("CUDA out of memory")

    held: list[Any] = []
    elfatt_sd.apply_patch(pipe, "tome")
    monkeypatch.setattr(processor_module, "attend", run_out)
    with pytest.raises(torch.OutOfMemoryError):
        picture_of(pipe, steps=2)
    [state] = held
    assert state.block_input is None and state.candidates is None


# Which call of a run is which step: every scheduler, through pipelines and by hand.


@pytest.fixture
def positions(monkeypatch: pytest.MonkeyPatch) -> list[Position]:
    """Positions of all UNet calls, as the patch sees them."""
    return counting(monkeypatch, Patch, "begin", lambda patch, position, *_: position)


@pytest.mark.parametrize(("name", "extra"), checks.SCHEDULERS, ids=checks.IDS)
def test_every_call_has_its_index(pipe: Any, positions: list[Position], name: str, extra: dict[str, Any]) -> None:
    pipe.scheduler = scheduler(name, extra)
    elfatt_sd.apply_patch(pipe, TWO_PHASES)
    for count in (7, 1, 7):
        positions.clear()
        pipe("a", num_inference_steps=count, guidance_scale=1.0, output_type="latent")
        assert positions == steps(len(pipe.scheduler.timesteps))


def test_sdxl_base_and_refiner_share_one_schedule(folder: Path, positions: list[Position]) -> None:
    base, parts = tiny.sdxl(folder), tiny.sdxl_parts(folder, refiner=True)
    refiner = tiny.quiet(diffusers.StableDiffusionXLImg2ImgPipeline(**parts, requires_aesthetics_score=True))
    for pipe in (base, refiner):
        elfatt_sd.apply_patch(pipe, TWO_PHASES)
    latents = base("a", num_inference_steps=10, denoising_end=0.8, output_type="latent").images
    refiner("a", image=latents, num_inference_steps=10, denoising_start=0.8, output_type="latent")
    assert positions == steps(10)


@torch.no_grad()
def test_a_bare_unet_in_a_loop_of_ones_own(pipe: Any, positions: list[Position]) -> None:
    unet, chosen = pipe.unet, scheduler("DDIMScheduler", {})
    given = torch.zeros(2, 4, 8, 8), torch.zeros(2, 3, tiny.TEXT_WIDTH)
    chosen.set_timesteps(10)
    elfatt_sd.apply_patch(unet, TWO_PHASES)
    for timestep in chosen.timesteps:
        unet(given[0], timestep.expand(2), given[1])
    assert positions == steps(10)
    positions.clear()
    for number in (999, 800, 799, 500, 0, torch.tensor(900), torch.tensor([900, 900])):
        unet(given[0], number, given[1])
    assert [position.step < 0.2 * position.steps for position in positions] == [True] * 2 + [False] * 3 + [True] * 2
    with pytest.raises(ElfattError, match=r"scheduler\.timesteps"):  # a step that is not known, where it matters
        unet(given[0], torch.tensor([10, 900]), given[1])
    elfatt_sd.apply_patch(unet, "tome")
    assert unet(given[0], torch.tensor([10, 900]), given[1]).sample.isfinite().all()
