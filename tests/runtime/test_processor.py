"""The processor computes each method's formula through a real layer, in the dtypes that are asked for."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_pipelines as tiny
from support import tiny_transformers
from support.checks import counting, inputs, runner
from torch import Tensor
from torch.nn import functional

import elfatt_sd
import elfatt_sd.patch as patch_module
from elfatt_sd.attention.merging import find_candidates, match_candidates
from elfatt_sd.config import METHODS, PatchConfig, Phase
from elfatt_sd.errors import ElfattError
from elfatt_sd.families import find_layers, main_denoiser


class Layer:
    """The first self-attention of a patched UNet in float64, with what one call of the UNet put in and got out."""

    def __init__(self, config: PatchConfig) -> None:
        unet = elfatt_sd.apply_patch(tiny.unet().double(), config)
        first = find_layers(unet)[0]
        self.attention: Any = first.attention
        first.norm.register_forward_pre_hook(lambda _, given: setattr(self, "block_input", given[0]))
        self.attention.register_forward_hook(lambda _, given, result: vars(self).update(tokens=given[0], result=result))
        sample, text = inputs()
        unet(sample, 999, text)
        patched = self.attention.elfatt_state
        self.split: Any = patched.patch.latest.states[patched.index].split

    def matching(self, ratio: float) -> Any:
        return match_candidates(find_candidates(self.block_input, self.split), ratio)

    def heads(self, projected: Tensor) -> Tensor:
        """`[batch, heads, tokens, head_dim]`."""
        return projected.unflatten(2, (self.attention.heads, -1)).transpose(1, 2)

    def qkv(self, tokens: Tensor) -> list[Tensor]:
        return [self.heads(getattr(self.attention, name)(tokens)) for name in ("to_q", "to_k", "to_v")]

    def check(self, merge: Any, mixed: Tensor) -> None:
        expected = merge.unmerge(self.attention.to_out[0](mixed.transpose(1, 2).flatten(2)))
        torch.testing.assert_close(self.result, expected, atol=1e-10, rtol=0)


def softmax(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, allowed: Tensor | None = None) -> Tensor:
    logits = q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    return (logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)).softmax(dim=3) @ v


@torch.no_grad()
def test_agent_sd_follows_its_recipe() -> None:
    """Agents are the projected tokens of a merge at 0.95; the second softmax is softer; 0.075 V is added."""
    layer = Layer(PatchConfig.preset("agent"))
    merge = layer.matching(0.4)
    q, k, v = layer.qkv(merge.merge(layer.tokens))
    assert q.shape[2] == 256 - int(0.4 * 256)
    agents = layer.heads(layer.attention.to_q(layer.matching(0.95).merge(layer.tokens)))
    assert agents.shape[2] == 16  # all but one of each 4x4 tokens
    layer.check(merge, softmax(q, agents, softmax(agents, k, v), scale=q.shape[3] ** (-0.5 * 0.3)) + 0.075 * v)


@torch.no_grad()
def test_elfatt_splits_heads() -> None:
    """Eq. lepe2sd on merged tokens: the first half of the heads through agents, the second inside blocks."""
    layer = Layer(PatchConfig.preset("elfatt", agents=12, block_size=30))
    merge = layer.matching(0.5)
    (qa, qb), (ka, kb), (va, vb) = (x.split(1, dim=1) for x in layer.qkv(merge.merge(layer.tokens)))
    agents = torch.stack([part.mean(dim=2) for part in qa.tensor_split(12, dim=2)], dim=2)
    block = torch.repeat_interleave(torch.tensor([32] * 4))  # of 30 tokens, or what tiles 128 of them
    first = softmax(qa, agents, softmax(agents, ka, va))
    layer.check(merge, torch.cat([first, softmax(qb, kb, vb, allowed=block[:, None] == block)], dim=1))


PHASES = {
    "dense": Phase(),
    "merged": Phase(1.0, "softmax", ratio=0.5),
    "agent": Phase(1.0, "agent", agents=8, agent_source="pooled"),
    "block": Phase(1.0, "block", block_size=16),
    "elfatt": Phase(1.0, "elfatt", block_size=16, agents=8, agent_source="pooled"),
    "sampled": Phase(1.0, "sampled", keys=16),
    "shared": Phase(1.0, "sampled", keys=16, residual_steps=2),
    "reuse": Phase(1.0, "reuse", residual_steps=2),
}
Seen = list[tuple[torch.dtype, bool]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The dtype of every attention that PyTorch computes, and whether it is of tokens to themselves."""
    says = lambda q, k, *_: (q.dtype, q.shape[2] == k.shape[2])  # noqa: E731
    return counting(monkeypatch, functional, "scaled_dot_product_attention", says)


@torch.no_grad()
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_with_logits_in_float32_on_request(half: torch.dtype, seen: Seen) -> None:
    """What it gives is close to what the model gives in float32."""
    whole, given = tiny.unet(**tiny.ONE_LAYER), inputs(torch.float32)
    unet = copy.deepcopy(whole).to(half)

    def run(net: Any) -> Tensor:
        seen.clear()
        sample, text = (each.to(net.dtype) for each in given)
        return net(sample, 999, text).sample  # type: ignore[no-any-return]

    bound = 0.1 * run(whole).abs().max()
    untouched, names = len(seen), ("merged", "agent", "elfatt", "block", "sampled")
    for name, (fp32_logits, dtype) in itertools.product(names, ((True, torch.float32), (False, half))):
        config = PatchConfig("half", (PHASES[name],), fp32_logits=fp32_logits)
        full = run(elfatt_sd.apply_patch(whole, config))
        found = run(elfatt_sd.apply_patch(unet, config))
        assert found.dtype == half and (found.float() - full).abs().max() < bound, name
        of_text = untouched // 2 if fp32_logits else 0  # attention to it stays as it is
        assert [found for found, _ in seen if found != dtype] == [half] * of_text and len(seen) >= untouched


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
def test_the_backend_serves_patched_layers_in_every_phase(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a method that approximates nothing."""
    unet, (sample, text) = tiny.unet(), inputs(torch.float32)
    monkeypatch.setattr(patch_module, "make_ready", lambda backend: None)
    elfatt_sd.apply_patch(unet, method, attention_backend="flash")
    for timestep in torch.tensor([999, 500, 0]):
        with pytest.raises(ElfattError, match=r"attention_backend='flash' (needs|does not take) "):
            unet(sample, timestep, text)


# `attention_dtype`: queries, keys and values are rounded to it, nothing else is, and exact phases stay as they are.


def in_dtype(phase: Phase, dtype: Any) -> PatchConfig:
    return PatchConfig("own", (phase.with_settings({"attention_dtype": dtype}),), levels=9)


@pytest.mark.parametrize("family", ["unet", "sd3"])
def test_what_is_approximated_is_rounded_a_little(folder: Path, family: str) -> None:
    """A model in half precision is left in it: settings that were found in float32 cost it no precision."""
    pipe, dtypes = tiny.sd15(folder), set[torch.dtype]()
    pipe, run = (pipe, runner(pipe)) if family == "unet" else tiny_transformers.sd3()
    for layer in find_layers(main_denoiser(pipe)):
        layer.attention.register_forward_hook(
            lambda *given: dtypes.add(given[2][0].dtype if isinstance(given[2], tuple) else given[2].dtype)
        )
    for name in ("dense", "merged", "elfatt", "shared", "reuse"):
        images, phase = [], PHASES[name]
        for dtype in (None, "bfloat16"):
            with elfatt_sd.patched(pipe, in_dtype(phase, dtype)):
                images.append(run())
        error = float((images[1] - images[0]).norm() / images[0].norm())
        assert 0 < error < (0.05 if phase.dense else 0.5), f"{name}; merging may choose other tokens"
    assert dtypes == {torch.float32}
    if family == "sd3":  # is given its texts in float32
        return
    pipe.to(dtype=torch.bfloat16)
    found = []
    for dtype in (None, "float16"):
        with elfatt_sd.patched(pipe, in_dtype(PHASES["sampled"], dtype)):
            found.append(run())
    assert torch.equal(*found)


def test_nothing_but_approximated_attention_is_rounded(folder: Path, seen: Seen) -> None:
    """Attention to the text, and that of exact phases, is that of the model. Steps that share are rounded."""
    pipe = tiny.sd15(folder, scheduler=tiny.ddim())
    begins, ours = list[int](), list[torch.dtype]()
    pipe.unet.register_forward_pre_hook(lambda *_: begins.append(len(seen)))
    pipe.unet.register_forward_hook(lambda *_: ours.extend(dtype for dtype, own in seen[begins[-1] :] if own))
    layers, rounded = len(find_layers(pipe.unet)), [torch.bfloat16]
    for last, exact, others in (
        (Phase(1.0), 2, {torch.float32}),
        (Phase(1.0, "sampled", keys=4, residual_steps=2), 1, {torch.float32, torch.bfloat16}),
    ):
        ours.clear(), seen.clear()
        phases = (Phase(0.5), last.with_settings({"attention_dtype": "bfloat16"}))
        with elfatt_sd.patched(pipe, PatchConfig("second half", phases, levels=9)):
            runner(pipe, num_inference_steps=4)()
        assert ours == [torch.float32] * 2 * layers + rounded * exact * layers
        assert {dtype for dtype, own in seen if not own} == others
    phase = Phase(residual_steps=4, attention_dtype="bfloat16")
    assert (phase.exact, phase.dense, phase.residual_steps, phase.corrects) == (False, True, 1, False), "by itself"
