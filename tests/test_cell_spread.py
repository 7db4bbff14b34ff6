"""Cell-and-spread attention equals its formula, written out densely in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from elfatt_sd.attention import softmax as log_sum_exp
from elfatt_sd.attention.joint import cell_joint_attention
from elfatt_sd.attention.ordering import cell_blocks


def qkv(tokens: int, heads: int = 3, size: int = 8, dtype: torch.dtype = torch.float32) -> Any:
    return torch.randn(3, 2, tokens, heads, size, generator=torch.Generator().manual_seed(tokens)).to(dtype)


def cell_spread_attention(q: Tensor, k: Tensor, v: Tensor, blocks: int, **options: Any) -> Tensor:
    """Each block has one token of every cell."""
    return cell_joint_attention(q, k, v, q.shape[1] // blocks, blocks, **options)


def dense(q: Tensor, k: Tensor, v: Tensor, blocks: int) -> Tensor:
    """Logits of the own cell as they are, of the own block plus log(blocks), of all others minus infinity."""
    q, k, v = (x.double() for x in (q, k, v))
    tokens = q.shape[1]
    cells = tokens // blocks
    block, cell = torch.arange(tokens) // cells, torch.arange(tokens) % cells
    rate = torch.full((tokens, tokens), -math.inf, dtype=torch.float64)
    rate[block[:, None] == block] = math.log(blocks)
    rate[cell[:, None] == cell] = 0.0  # the own token lies in both; it counts once
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5 + rate.to(q.device)
    return torch.einsum("bhqk,bkhd->bqhd", logits.softmax(dim=-1), v)


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
CASES = [(12, 3), (64, 8), (64, 2), (64, 32), (96, 4), (30, 5), (7, 1), (7, 7), (35, 7)]


@pytest.mark.parametrize(("tokens", "blocks"), CASES)
@pytest.mark.parametrize("device", DEVICES)
def test_formula(tokens: int, blocks: int, device: str) -> None:
    q, k, v = qkv(tokens).to(device)
    out = cell_spread_attention(q, k, v, blocks)
    torch.testing.assert_close(out.double(), dense(q, k, v, blocks), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", DEVICES)
def test_own_token_that_dominates(dtype: torch.dtype, device: str) -> None:
    """The own token is left out of the block, not subtracted from it: no precision is lost where it weighs most."""
    q, _, v = qkv(64, size=16, dtype=dtype).to(device)
    out = cell_spread_attention(32 * q, q, v, 8)
    torch.testing.assert_close(out.double(), dense(32 * q, q, v, 8), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("blocks", [1, 8])
def test_fp32_logits_round_the_result_alone(dtype: torch.dtype, blocks: int) -> None:
    q, k, v = qkv(64, dtype=dtype)
    out = cell_spread_attention(q, k, v, blocks, fp32_logits=True)
    assert torch.equal(out, cell_spread_attention(q.float(), k.float(), v.float(), blocks).to(dtype))


def test_more_blocks_than_a_cuda_grid_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch beyond the kernels' limit goes in several calls; it is tried here with a limit of three."""
    q, k, v = qkv(64)
    whole = cell_spread_attention(q, k, v, 8)
    sizes: list[int] = []
    fused = log_sum_exp._fused_cpu

    def spy(q: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        sizes.append(len(q))
        return fused(q, *given)

    monkeypatch.setattr(log_sum_exp, "GRID_LIMIT", 3)
    monkeypatch.setattr(log_sum_exp, "GRID_FREE", ())
    monkeypatch.setattr(log_sum_exp, "_fused_cpu", spy)
    torch.testing.assert_close(cell_spread_attention(q, k, v, 8), whole)
    assert max(sizes) == 3
    assert len(sizes) > 2 + 2 * 8 / 3  # heads are split, too


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_near_the_limit_of_the_dtype(dtype: torch.dtype) -> None:
    q, k, v = qkv(64, size=64, dtype=dtype)
    q, k = (torch.nn.functional.normalize(x.float(), dim=-1).mul(700).to(dtype) for x in (q, k))
    assert cell_spread_attention(q, k, v, 8).isfinite().all()


def test_equal_tokens_weigh_as_in_exact_attention() -> None:
    """Where all keys are alike, every token of the picture weighs the same, sampled or not: the rate is right."""
    q, k, _ = qkv(64)
    k = k[:, :1].expand_as(k)
    block = (torch.arange(64) // 8).float()  # with 8 blocks of 8 tokens, a cell holds one token of each block
    v = block[None, :, None, None].expand(2, 64, 3, 8)
    out = cell_spread_attention(q, k, v.contiguous(), 8)
    expected = (block.mean() + 7 * block) / 8  # an eighth of the weight lies in the cell, the rest in the block
    torch.testing.assert_close(out, expected[None, :, None, None].expand_as(out), atol=1e-5, rtol=0)


def test_gradients() -> None:
    inputs = tuple(x.double().requires_grad_() for x in qkv(12, heads=2, size=4))
    assert torch.autograd.gradcheck(lambda q, k, v: cell_spread_attention(q, k, v, 3), inputs)
    q, k, v = (x.detach().float().requires_grad_() for x in inputs)
    cell_spread_attention(q, k, v, 3).square().sum().backward()
    wanted = torch.autograd.grad(dense(*inputs, 3).square().sum(), inputs)
    for got, want in zip((q, k, v), wanted, strict=True):
        assert got.grad is not None
        torch.testing.assert_close(got.grad.double(), want, atol=1e-4, rtol=1e-4)


def test_without_a_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(64)
    fused = cell_spread_attention(q, k, v, 8)

    def missing(*_: Any) -> Any:
        raise AssertionError("float64 has no fused kernel")

    monkeypatch.setattr(log_sum_exp, "_fused_cpu", missing)
    torch.testing.assert_close(cell_spread_attention(q.double(), k.double(), v.double(), 8).float(), fused)


def test_compiles_whole() -> None:
    q, k, v = qkv(64)
    compiled = torch.compile(cell_spread_attention, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, 8), cell_spread_attention(q, k, v, 8))


@pytest.mark.parametrize(
    ("tokens", "size", "blocks"),
    [(4096, 128, 32), (4096, 227, 16), (3185, 128, 35), (7, 128, 1), (7, 1, 7), (256, 37, 8)],
)
def test_the_number_of_blocks_divides_the_tokens(tokens: int, size: int, blocks: int) -> None:
    assert cell_blocks(tokens, size) == blocks
