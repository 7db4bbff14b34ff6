"""The processor computes each method's formula through a real layer, in the dtypes that are asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_pipelines as tiny
from support import tiny_transformers
from support.checks import ACTIVE, COLUMNS, ROWS, generator, inputs, runner
from torch import Tensor
from torch.nn import functional

import elfatt_sd
import elfatt_sd.patch as patch_module
from elfatt_sd.attention.merging import find_candidates, match_candidates, split_grid
from elfatt_sd.attention.ordering import Grid, block_permutation, partition
from elfatt_sd.config import METHODS, PatchConfig, Phase
from elfatt_sd.errors import ElfattError
from elfatt_sd.families import find_layers, main_denoiser


class Layer:
    """The first self-attention of a patched UNet in float64, with what one call of the UNet put in and got out."""

    def __init__(self, config: PatchConfig, **changes: Any) -> None:
        unet = tiny.unet(**changes).double()
        elfatt_sd.apply_patch(unet, config)
        first = find_layers(unet)[0]
        self.attention: Any = first.attention
        sample, text = inputs()
        handles = [
            first.norm.register_forward_pre_hook(lambda _, given: setattr(self, "block_input", given[0])),
            self.attention.register_forward_hook(self._keep),
        ]
        with torch.no_grad():
            unet(sample, 999, text)
        for handle in handles:
            handle.remove()
        patched = self.attention.elfatt_state
        self.state = patched.patch.latest.states[patched.index]
        self.split: Any = self.state.split

    def _keep(self, module: Any, given: tuple[Tensor, ...], result: Tensor) -> None:
        self.tokens, self.result = given[0], result

    def matching(self, ratio: float) -> Any:
        return match_candidates(find_candidates(self.block_input, self.split), ratio)

    def heads(self, projected: Tensor) -> Tensor:
        """`[batch, heads, tokens, head_dim]`."""
        return projected.unflatten(2, (self.attention.heads, -1)).transpose(1, 2)

    def qkv(self, tokens: Tensor) -> list[Tensor]:
        return [self.heads(getattr(self.attention, name)(tokens)) for name in ("to_q", "to_k", "to_v")]

    def out(self, mixed: Tensor) -> Tensor:
        projected: Tensor = self.attention.to_out[0](mixed.transpose(1, 2).flatten(2))
        return projected

    def check(self, expected: Tensor) -> None:
        torch.testing.assert_close(self.result, expected, atol=1e-10, rtol=0)


def softmax(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, allowed: Tensor | None = None) -> Tensor:
    logits = q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    return logits.softmax(dim=3) @ v


def same_block(tokens: int, size: int) -> Tensor:
    """`[tokens, tokens]`: whether two tokens of a sequence share a block."""
    blocks, base, larger = partition(tokens, size)
    block = torch.repeat_interleave(torch.tensor([base + 1] * larger + [base] * (blocks - larger)))
    return block[:, None] == block


@torch.no_grad()
@pytest.mark.parametrize("use_rand", [True, False])
def test_agent_sd_follows_its_recipe(use_rand: bool) -> None:
    """Agents are the projected tokens of a merge at 0.95; the second softmax is softer; 0.075 V is added."""
    layer = Layer(PatchConfig.preset("agent", use_rand=use_rand))
    fixed = split_grid(ROWS, COLUMNS, 4)[: ROWS * COLUMNS]
    assert torch.equal(layer.split.places, fixed) is not use_rand
    merge = layer.matching(0.4)
    q, k, v = layer.qkv(merge.merge(layer.tokens))
    assert q.shape[2] == 256 - int(0.4 * 256)
    agents = layer.heads(layer.attention.to_q(layer.matching(0.95).merge(layer.tokens)))
    assert agents.shape[2] == 16  # all but one of each 4x4 tokens
    mixed = softmax(q, agents, softmax(agents, k, v), scale=q.shape[3] ** (-0.5 * 0.3)) + 0.075 * v
    layer.check(merge.unmerge(layer.out(mixed)))


@torch.no_grad()
@pytest.mark.parametrize("heads", [2, 5])
def test_elfatt_splits_heads_or_channels(heads: int) -> None:
    """Eq. lepe2sd on merged tokens: the first half of the heads through agents, the second inside blocks.

    With an odd number of heads eq. lepe1sd, as at the top of SD 2.x: half of the channels of each of them.
    """
    odd = {"block_out_channels": (80, 160, 160), "attention_head_dim": (5, 10, 10)} if heads == 5 else {}
    layer = Layer(PatchConfig.preset("elfatt", agents=12, block_size=30), **odd)
    merge, dim, half = layer.matching(0.5), 3 if odd else 1, 8 if odd else 1
    (qa, qb), (ka, kb), (va, vb) = (x.split(half, dim=dim) for x in layer.qkv(merge.merge(layer.tokens)))
    agents = torch.stack([part.mean(dim=2) for part in qa.tensor_split(12, dim=2)], dim=2)
    first, second = softmax(qa, agents, softmax(agents, ka, va)), softmax(qb, kb, vb, allowed=same_block(128, 30))
    layer.check(merge.unmerge(layer.out(torch.cat([first, second], dim=dim))))


def place_in(order: str) -> Tensor:
    """Where the blocks' order puts each token of the picture."""
    permutation = block_permutation(order, Grid.image(ROWS, COLUMNS), 20)  # type: ignore[arg-type]
    return torch.arange(256) if permutation is None else permutation.argsort()


ORDERS: list[Any] = [("raster",), ("windows",), ("curve",), ("strided",), ("windows", "strided"), ("raster", "curve")]


@torch.no_grad()
@pytest.mark.parametrize("orders", ORDERS, ids="-".join)
def test_blocks_of_tokens_in_the_picture(orders: Any) -> None:
    """Each token gets its own result back, of half of the heads in another order; merged ones are where they are."""
    for ratio in (0.0, 0.5)[: 3 - len(orders)]:
        phase = Phase(1.0, "block", ratio=ratio, block_size=20, block_order=orders[0], second_order=[*orders, None][1])
        layer, mixed = Layer(PatchConfig("blocks", (phase,))), []
        merge = layer.matching(ratio) if ratio else None
        tokens = layer.tokens if merge is None else merge.merge(layer.tokens)
        positions = torch.arange(256).expand(2, -1) if merge is None else merge.positions
        together, qkv = same_block(tokens.shape[1], 20), layer.qkv(tokens)
        for head in range(2):
            rank = place_in((orders * 2)[head])[positions].argsort(dim=1).argsort(dim=1)  # of a token in the order
            allowed = torch.stack([together[row][:, row] for row in rank])[:, None]
            mixed.append(softmax(*(x[:, head : head + 1] for x in qkv), allowed=allowed))
        output = layer.out(torch.cat(mixed, dim=1))
        layer.check(output if merge is None else merge.unmerge(output))


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
Seen = list[tuple[torch.dtype, bool]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The dtype of every attention that PyTorch computes, and whether it is of tokens to themselves."""
    calls: Seen = []
    attend = functional.scaled_dot_product_attention

    def spy(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append((q.dtype, q.shape[2] == k.shape[2]))
        return attend(q, k, *args, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)
    return calls


@torch.no_grad()
@pytest.mark.parametrize("name", ["merged", "agent", "elfatt", "block", "sampled"])
def test_logits_in_float32_on_request(name: str, seen: Seen) -> None:
    unet, (sample, text) = tiny.unet().half(), inputs(torch.float16)
    for fp32_logits, dtype in ((True, torch.float32), (False, torch.float16)):
        elfatt_sd.apply_patch(unet, PatchConfig("half", (PHASES[name],), fp32_logits=fp32_logits))
        unet(sample, 999, text)
        attention: Any = find_layers(unet)[0].attention
        patch = attention.elfatt_state.patch
        patch.enter(patch.latest)
        seen.clear()
        assert attention(torch.randn(2, 256, 16, generator=generator()).half()).dtype == torch.float16
        assert {found for found, _ in seen} == {dtype}
        patch.end()


@torch.no_grad()
@pytest.mark.parametrize("backend", ["auto", "native"])
@pytest.mark.parametrize("method", ACTIVE)
def test_a_layer_that_is_left_alone_is_exact(method: str, backend: str) -> None:
    """Nothing that was drawn for the approximation is left in it, whichever kernel serves it."""
    unet, (sample, text) = tiny.unet(), inputs(torch.float32)
    timestep = torch.arange(999, -1, -1)[4]
    untouched = unet(sample, timestep, text).sample
    elfatt_sd.apply_patch(unet, method, attention_backend=backend)
    unet.elfatt_patch.pays = lambda *_: False
    torch.testing.assert_close(unet(sample, timestep, text).sample, untouched, atol=1e-5, rtol=0)


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


@pytest.fixture(params=["unet", "flux", "sd3"])
def made(request: pytest.FixtureRequest, folder: Path) -> tuple[Any, Callable[..., Tensor]]:
    if request.param == "unet":
        pipe = tiny.sd15(folder)
        return pipe, runner(pipe)
    if request.param == "flux":
        pipe = tiny_transformers.flux(folder)
        return pipe, tiny_transformers.runner(pipe, prompt="a b", height=32, width=48, max_sequence_length=16)
    return tiny_transformers.sd3()


def test_what_is_approximated_is_rounded_a_little(made: tuple[Any, Callable[..., Tensor]]) -> None:
    """A model in half precision is left in it: settings that were found in float32 cost it no precision."""
    (pipe, run), dtypes = made, set[torch.dtype]()
    for layer in find_layers(main_denoiser(pipe)):
        layer.attention.register_forward_hook(
            lambda *given: dtypes.add(given[2][0].dtype if isinstance(given[2], tuple) else given[2].dtype)
        )
    for name, phase in PHASES.items():
        images = []
        for dtype in (None, "bfloat16"):
            try:
                with elfatt_sd.patched(pipe, in_dtype(phase, dtype)):
                    images.append(run())
            except ElfattError:
                assert phase.merge.ratio, "all else goes with every family"
        if images:
            error = float((images[1] - images[0]).norm() / images[0].norm())
            assert 0 < error < (0.05 if phase.dense else 0.5), f"{name}; merging may choose other tokens"
    assert dtypes == {torch.float32}
    if hasattr(run, "given") and "prompt" not in run.given:  # but texts in float32
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
