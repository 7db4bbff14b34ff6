"""What is installed on a model: processors that come and go, copies, and what a call leaves behind."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from support import tiny_pipelines as tiny
from support.checks import ACTIVE, elfatt_processors, picture_of, processors, recorded

import elfatt_sd
from elfatt_sd.benchmarking.variants import forget_residuals, patched_layers
from elfatt_sd.config import PatchConfig, Phase
from elfatt_sd.errors import ElfattError
from elfatt_sd.measure import peak_memory
from elfatt_sd.runtime import processor as processor_module
from elfatt_sd.runtime.processor import ElfattProcessor


def test_copies_of_a_patched_unet_work_on_their_own(pipe: Any) -> None:
    elfatt_sd.apply_patch(pipe.unet, "elfatt", active_fraction=1.0)
    twin = copy.deepcopy(pipe.unet)
    sample, text = torch.randn(1, 4, 16, 16), torch.randn(1, 7, tiny.TEXT_WIDTH)
    with torch.no_grad():
        before = pipe.unet(sample, 999, text).sample
        elfatt_sd.remove_patch(pipe.unet)
        assert torch.equal(twin(sample, 999, text).sample, before)
        elfatt_sd.remove_patch(twin)
        assert torch.equal(twin(sample, 999, text).sample, pipe.unet(sample, 999, text).sample)


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_copies_of_a_patched_pipeline_follow_their_own_scheduler(pipe: Any, twin_of: Callable[[Any], Any]) -> None:
    elfatt_sd.apply_patch(pipe, "elfatt")
    before = picture_of(pipe, 5)
    twin = twin_of(pipe)
    assert twin.unet.elfatt_patch.schedule._find_scheduler() is twin.scheduler
    pipe.scheduler.set_timesteps(50)
    assert torch.equal(picture_of(twin, 5), before)
    again = copy.deepcopy(twin)
    del twin
    assert torch.equal(picture_of(again, 5), before)


def test_a_patched_unet_is_pickled_without_the_rest_of_its_pipeline(pipe: Any) -> None:
    alone = len(pickle.dumps(pipe.unet))
    elfatt_sd.apply_patch(pipe, "elfatt")
    picture_of(pipe)
    saved = pickle.dumps(pipe.unet)
    assert len(saved) < alone + len(pickle.dumps(pipe.vae))
    sample, text = torch.randn(1, 4, 16, 16), torch.randn(1, 7, tiny.TEXT_WIDTH)
    with torch.no_grad():
        assert torch.equal(pickle.loads(saved)(sample, 999, text).sample, pipe.unet(sample, 999, text).sample)


def test_masks_and_unexpected_tokens_fall_back_to_exact_attention(pipe: Any) -> None:
    elfatt_sd.apply_patch(pipe.unet, "elfatt", active_fraction=1.0)
    layer = pipe.unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    with torch.no_grad():
        pipe.unet(torch.zeros(1, 4, 16, 16), 999, torch.zeros(1, 7, tiny.TEXT_WIDTH))
        tokens = torch.randn(1, 256, 16)
        mask = torch.zeros(1, 1, 256)
        mask[..., 128:] = -10000.0
        with pytest.warns(UserWarning, match="attn1 stays exact: it is called without the hooks of its patched model"):
            masked, odd = layer(tokens, attention_mask=mask), layer(tokens[:, :100])
        elfatt_sd.remove_patch(pipe.unet)
        assert torch.equal(masked, layer(tokens, attention_mask=mask))
        assert torch.equal(odd, layer(tokens[:, :100]))
        assert torch.equal(ElfattProcessor()(layer, tokens), layer(tokens)), "on a layer that is not patched"


class Other(AttnProcessor2_0):
    """A processor that is not known to be plain attention."""


def test_displaced_processors_are_reported_once(pipe: Any) -> None:
    before = processors(pipe)
    elfatt_sd.apply_patch(pipe, "elfatt")
    patched = picture_of(pipe)
    plain = dict(pipe.unet.attn_processors)
    assert [type(processor) for processor in plain.values()] == [type(processor) for processor in before.values()]
    pipe.unet.set_attn_processor(Other())
    said = r"3 patched layers now have another attention processor \(Other\), the first is down_blocks\.0.*attn1;"
    with pytest.warns(UserWarning, match=said), recorded() as calls:
        displaced = picture_of(pipe)
    assert not calls
    assert torch.equal(picture_of(pipe), displaced)  # no second warning: warnings are errors here
    pipe.unet.set_attn_processor(dict(plain))
    assert torch.equal(picture_of(pipe), patched), "plain attention is back, and the method with it"
    elfatt_sd.remove_patch(pipe)
    assert all(processors(pipe)[name] is old for name, old in before.items())
    torch.testing.assert_close(picture_of(pipe), displaced, atol=1e-3, rtol=0)
    elfatt_sd.apply_patch(pipe, "elfatt")
    pipe.unet.set_attn_processor(Other())
    others = processors(pipe)
    elfatt_sd.remove_patch(pipe)
    assert all(processors(pipe)[name] is found for name, found in others.items()), "not what was there before"
    pipe.unet.set_attn_processor(dict(plain))


def test_what_replaces_plain_attention_by_plain_attention_leaves_the_patch(folder: Path) -> None:
    """Slicing, fusing, resetting, an IP-Adapter, saving and putting back: they are of the original."""
    pipe = tiny.sd15(folder)
    elfatt_sd.apply_patch(pipe, "elfatt")
    expected = picture_of(pipe)
    anew = {name: type(old)() for name, old in pipe.unet.attn_processors.items()}
    for change in (
        lambda: pipe.unet.set_attn_processor(anew),
        lambda: pipe.enable_attention_slicing(1),
        pipe.unet.set_default_attn_processor,
        lambda: pipe.fuse_qkv_projections(vae=False),
    ):
        change()
        torch.testing.assert_close(picture_of(pipe), expected, atol=1e-4, rtol=0)
    kept = pipe.unet.attn_processors
    elfatt_sd.remove_patch(pipe)
    pipe.unfuse_qkv_projections(vae=False)
    assert not elfatt_processors(pipe.unet)
    pipe.unet.set_attn_processor(kept)
    assert not elfatt_processors(pipe.unet)


class Scaled(AttnProcessor2_0):
    """Takes an argument of its own in every step."""

    given: ClassVar[list[Any]] = []

    def __call__(
        self,
        attn: Any,
        hidden_states: Any,
        encoder_hidden_states: Any = None,
        attention_mask: Any = None,
        strength=None,
    ) -> Any:
        Scaled.given.append((encoder_hidden_states is None, strength))
        return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask)


def test_other_processors_are_left_alone_or_taken_over_by_name(pipe: Any) -> None:
    """What is taken over gets the arguments that it names in exact steps."""
    pipe.scheduler = tiny.ddim()
    before = pipe.unet.attn_processors
    pipe.unet.set_attn_processor({name: Scaled() if "attn1" in name else old for name, old in before.items()})
    scaled = processors(pipe)
    options: dict[str, Any] = {"steps": 5, "cross_attention_kwargs": {"strength": 7}}
    try:
        untouched = picture_of(pipe, **options)
        with pytest.warns(UserWarning, match="3 layers are left alone, the first is .* Scaled, is not known"):
            elfatt_sd.apply_patch(pipe, "elfatt-fast", levels=1)
        assert torch.equal(picture_of(pipe, **options), untouched)
        with pytest.warns(UserWarning, match=r"names \(Scaled\) to replace.* \(Scald in take_over is another class"):
            elfatt_sd.apply_patch(pipe, "elfatt-fast", levels=1, take_over=["Scald"])
        with pytest.raises(ElfattError, match=r"take_over=\[7\] is not accepted; give names"):
            elfatt_sd.apply_patch(pipe, "elfatt-fast", levels=1, take_over=[7])  # type: ignore[list-item]
        for given in ("Scaled", [Scaled]):
            elfatt_sd.apply_patch(pipe, "elfatt-fast", levels=1, take_over=given)
            assert len(elfatt_processors(pipe.unet)) == 3
            elfatt_sd.remove_patch(pipe)
        assert "Scaled" in elfatt_sd.plan(pipe, "elfatt-fast", levels=1).layers[0].reason
        elfatt_sd.apply_patch(pipe, "elfatt-fast", levels=1, take_over=["Scaled"])
        assert len(elfatt_processors(pipe.unet)) == 3
        Scaled.given.clear()
        assert not torch.equal(picture_of(pipe, **options), untouched)
        calls = sum(name.endswith("attn1.processor") for name in before)
        assert Scaled.given == [(True, 7)] * (5 * calls - 4 * 3)
        elfatt_sd.remove_patch(pipe)
        assert all(processors(pipe)[name] is old for name, old in scaled.items())
    finally:
        elfatt_sd.remove_patch(pipe)
        pipe.unet.set_attn_processor(before)


@pytest.mark.filterwarnings("ignore:.*approximates no step of this run, which begins with step 1000")
@pytest.mark.parametrize(("method", "step"), [*((method, 0) for method in ACTIVE), ("elfatt-quality", 999)])
def test_a_patched_call_needs_no_more_memory_than_it_keeps(method: str, step: int) -> None:
    """Beyond a percent, for what was drawn: positions of samples, blocks and destinations."""
    unet = tiny.unet()
    sample, text = torch.randn(2, 4, 64, 64), torch.randn(2, 5, tiny.TEXT_WIDTH)
    timestep = torch.arange(999, -1, -1)[step]

    @torch.no_grad()
    def call() -> None:
        unet(sample, timestep, text)

    call()
    cpu = torch.device("cpu")
    untouched = peak_memory(call, cpu)
    assert untouched
    with elfatt_sd.patched(unet, method):
        call()
        forget_residuals(unet)
        peak = peak_memory(call, cpu)
        states = [layer.patch.latest.states[layer.index] for layer in patched_layers(unet)]
        kept = sum(one.values.nbytes for state in states for one in state.residuals.values())
        assert bool(kept) == (method == "elfatt-quality" and step == 0), "given back in the last step"
        assert (peak or 0) <= 1.01 * untouched + kept


def test_a_call_leaves_no_tokens_behind(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What every layer kept would add up in the peak of memory; where memory ran out, another call would need it."""

    def run_out(*_: Any) -> None:
        states = [module.elfatt_state.latest for module in pipe.unet.modules() if hasattr(module, "elfatt_state")]
        held.extend(state for state in states if state.block_input is not None)
        raise torch.OutOfMemoryError("CUDA out of memory")

    held: list[Any] = []
    elfatt_sd.apply_patch(pipe, "tome")
    picture_of(pipe, steps=2)
    states = [layer.patch.latest.states[layer.index] for layer in patched_layers(pipe.unet)]
    assert states and all(state.block_input is None for state in states)
    monkeypatch.setattr(processor_module, "attend", run_out)
    with pytest.raises(torch.OutOfMemoryError):
        picture_of(pipe, steps=2)
    [state] = held
    assert state.block_input is None and state.candidates is None


def test_samples_of_fused_projections(folder: Path) -> None:
    pipe = tiny.sd15(folder)
    elfatt_sd.apply_patch(pipe, PatchConfig("samples", (Phase(1.0, "sampled", block_size=16, groups=4),)))
    apart = picture_of(pipe)
    pipe.unet.fuse_qkv_projections()
    torch.testing.assert_close(picture_of(pipe), apart, atol=1e-4, rtol=0)
