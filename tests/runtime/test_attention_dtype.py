"""`attention_dtype`: queries, keys and values are rounded to it, nothing else is, and exact phases stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from support import tiny_pipelines as tiny
from support import tiny_transformers
from support.checks import runner
from torch import Tensor
from torch.nn import functional

import elfatt_sd
from elfatt_sd import ElfattError, PatchConfig, Phase
from elfatt_sd.config import complaints
from elfatt_sd.families import find_layers
from elfatt_sd.phases import DENSE

FAMILIES = ("sd3", "flux", "qwen_image", "z_image", "wan", "hunyuan_video")
PHASES = {
    "dense": Phase(),
    "merged": Phase(1.0, "softmax", ratio=0.5),
    "agent": Phase(1.0, "agent", agents=8, agent_source="pooled"),
    "block": Phase(1.0, "block", block_size=16),
    "elfatt": Phase(1.0, "elfatt", block_size=16, agents=8, agent_source="pooled"),
    "sampled": Phase(1.0, "sampled", keys=16),
    "cell_spread": Phase(1.0, "cell_spread", block_size=16, cell=8),
    "shared": Phase(1.0, "sampled", keys=16, residual_steps=2),
    "reuse": Phase(1.0, "reuse", residual_steps=2),
}


def in_dtype(phase: Phase, dtype: Any) -> PatchConfig:
    return PatchConfig("own", (phase.with_settings({"attention_dtype": dtype}),), levels=9)


def made(family: str, folder: Path) -> tuple[Any, Callable[..., Tensor]]:
    classes = {"qwen_image": "QwenImage", "z_image": "ZImage", "wan": "Wan", "hunyuan_video": "HunyuanVideo"}
    if not hasattr(diffusers, f"{classes.get(family, 'Flux')}Pipeline"):
        pytest.skip("this version of diffusers does not have it")
    if family == "unet":
        pipe = tiny.sd15(folder)
        return pipe, runner(pipe)
    if family == "flux":
        pipe = tiny_transformers.flux(folder)
        return pipe, tiny_transformers.runner(pipe, prompt="a b", height=32, width=48, max_sequence_length=16)
    return getattr(tiny_transformers, family)()  # type: ignore[no-any-return]


@pytest.mark.parametrize("phase", PHASES.values(), ids=list(PHASES))
@pytest.mark.parametrize("family", ["unet", *FAMILIES])
def test_what_is_approximated_is_rounded_a_little(family: str, phase: Phase, folder: Path) -> None:
    pipe, run = made(family, folder)
    try:
        with elfatt_sd.patched(pipe, in_dtype(phase, None)):
            alike = run()
    except ElfattError as error:
        assert phase.merge.ratio, "all else goes with every family"
        pytest.skip(f"it does not go with this family: {error}")
    outputs = []
    for denoiser in (getattr(pipe, name) for name in ("unet", "transformer") if hasattr(pipe, name)):
        for layer in find_layers(denoiser):
            layer.attention.register_forward_hook(lambda *given: outputs.append(given[2]))
    with elfatt_sd.patched(pipe, in_dtype(phase, "bfloat16")):
        rounded = run()
    first = [output[0] if isinstance(output, tuple) else output for output in outputs]
    assert {output.dtype for output in first} == {torch.float32}
    error = float((rounded - alike).norm() / alike.norm())
    assert 0 < error < (0.05 if phase.dense else 0.5), "merging may choose other tokens"


def test_nothing_but_approximated_attention_is_rounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention to the text, and that of exact phases, is that of the model."""
    pipe, seen = tiny.sd15(folder, scheduler=tiny.ddim()), []
    inside: list[bool] = []
    pipe.unet.register_forward_pre_hook(lambda *_: inside.append(True))
    pipe.unet.register_forward_hook(lambda *_: inside.clear())
    attend = functional.scaled_dot_product_attention

    def spy(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.extend([(q.dtype, q.shape[2] == k.shape[2])] * bool(inside))
        return attend(q, k, *args, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)
    halves = (Phase(0.5), Phase(1.0, attention_dtype="bfloat16"))
    with elfatt_sd.patched(pipe, PatchConfig("second half", halves, levels=9)):
        runner(pipe, num_inference_steps=4)()
    own = [dtype for dtype, to_itself in seen if to_itself]
    layers = len(find_layers(pipe.unet))
    assert own == [torch.float32] * 2 * layers + [torch.bfloat16] * 2 * layers
    assert {dtype for dtype, to_itself in seen if not to_itself} == {torch.float32}


def test_the_exact_step_of_a_shared_difference_is_rounded_too(folder: Path) -> None:
    pipe, found = tiny.sd15(folder), {}
    outputs: list[Tensor] = []
    pipe.unet.register_forward_hook(lambda *given: outputs.append(given[2][0]))
    configs = {name: in_dtype(PHASES[name], "bfloat16") for name in ("dense", "shared")}
    for name, config in {"untouched": PatchConfig("sd"), **configs}.items():
        outputs.clear()
        with elfatt_sd.patched(pipe, config):
            runner(pipe)()
        found[name] = outputs[0]
    torch.testing.assert_close(found["shared"], found["dense"], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(found["dense"], found["untouched"], atol=1e-4)


def test_float16_rounds_less_than_bfloat16(folder: Path) -> None:
    pipe = tiny.sd15(folder)
    run = runner(pipe)
    untouched, errors = run(), {}
    for dtype in ("float16", "bfloat16"):
        with elfatt_sd.patched(pipe, in_dtype(Phase(), dtype)):
            errors[dtype] = float((run() - untouched).norm())
    assert 0 < errors["float16"] < 0.5 * errors["bfloat16"]


@pytest.mark.parametrize("family", ["unet", "flux"])
def test_models_in_half_precision_are_left_in_it(family: str, folder: Path) -> None:
    """Settings that were found in float32 cost them no precision."""
    pipe, run = made(family, folder)
    pipe.to(dtype=torch.bfloat16)
    found = []
    for dtype in (None, "float16"):
        with elfatt_sd.patched(pipe, in_dtype(PHASES["sampled"], dtype)):
            found.append(run())
    assert torch.equal(*found)


def test_a_configuration_keeps_it() -> None:
    config = in_dtype(PHASES["shared"], "bfloat16")
    assert PatchConfig.from_dict(config.to_dict()) == config
    assert config.phases[0].attention_dtype == "bfloat16"
    assert "attention_dtype" not in str(in_dtype(PHASES["shared"], None).to_dict()), "hashes stay as they are"
    quality = PatchConfig.preset("elfatt-fast", attention_dtype="float16")
    assert [phase.attention_dtype for phase in quality.phases] == [None, "float16"], "exact steps stay exact"


def test_exact_attention_shares_nothing() -> None:
    phase = Phase(residual_steps=4, attention_dtype="bfloat16")
    assert (phase.exact, phase.dense, phase.residual_steps, phase.corrects) == (False, True, 1, False)
    assert (DENSE[None].exact, DENSE["bfloat16"].exact) == (True, False)
    shared = PatchConfig("own", (DENSE["bfloat16"],)).with_settings(residual_steps=4)
    assert complaints(shared) == ["method 'own' has no setting residual_steps"]


@pytest.mark.parametrize("value", ["float32", "fp16", "", 16, True, torch.bfloat16])
def test_what_is_no_narrower_dtype_is_refused(value: Any) -> None:
    with pytest.raises(ElfattError, match=r"attention_dtype=.* is not known; accepted: bfloat16, float16\."):
        Phase(attention_dtype=value)
    with pytest.raises(ElfattError, match="attention_dtype="):
        PatchConfig.preset("elfatt", attention_dtype=value)


def test_float32_logits_exclude_it() -> None:
    with pytest.raises(ElfattError, match="attention_dtype='float16' is not accepted with fp32_logits=True"):
        PatchConfig("own", (DENSE["float16"],), fp32_logits=True)


def test_a_plan_says_so(folder: Path) -> None:
    plan = elfatt_sd.plan(tiny.sd15(folder), in_dtype(PHASES["sampled"], "bfloat16"))
    assert "sampled keys (2 groups) in bfloat16" in str(plan)
