"""Parts joined by log-sum-exps equal one softmax, whatever is masked."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from elfatt_sd.attention import softmax as log_sum_exp
from elfatt_sd.attention.softmax import attend, key_bias

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def tokens(count: int, seed: int, size: int = 16, heads: int = 3) -> Tensor:
    return torch.randn(2, count, heads, size, generator=torch.Generator().manual_seed(seed))


def logits(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bqhd,bkhd->bqhk", q.double(), k.double()) * q.shape[3] ** -0.5


@pytest.mark.parametrize("size", [40, 64, 128, 160])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_two_parts_are_one_softmax(size: int, dtype: torch.dtype, device: str) -> None:
    q, k, v = (tokens(n, n, size).to(device, dtype) for n in (7, 20, 21))
    v = v[:, :20]
    joined = attend(q, k[:, :13], v[:, :13]).joined(attend(q, k[:, 13:], v[:, 13:]))
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
    wanted = torch.einsum("bqhk,bkhd->bqhd", logits(q, k).softmax(-1), v.double())
    torch.testing.assert_close(joined.mixed.double(), wanted, atol=tolerance, rtol=0)
    torch.testing.assert_close(joined.total.double(), logits(q, k).logsumexp(-1), atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_masked_keys_weigh_nothing(dtype: torch.dtype, device: str) -> None:
    """The second image's part has no key at all: it weighs nothing, and is no NaN."""
    q, k, v = (tokens(9, seed).to(device, dtype) for seed in range(3))
    mask = torch.tensor([[True, False] * 4 + [True], [False] * 9], device=device)
    part = attend(q, k, v, bias=key_bias(mask, dtype))
    assert part.mixed.isfinite().all()
    assert part.total.isfinite().all()
    assert torch.equal(attend(q, k, v).joined(part).mixed[1], attend(q, k, v).mixed[1])
    wanted = attend(q[:1], k[:1, ::2], v[:1, ::2])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(part.mixed[:1], wanted.mixed, atol=tolerance, rtol=0)
    torch.testing.assert_close(part.total[:1], wanted.total, atol=tolerance, rtol=0)
    plain = attend(*(x.double() for x in (q, k, v)), bias=key_bias(mask, torch.float64))
    torch.testing.assert_close(plain.mixed[0], part.mixed[0].double(), atol=tolerance, rtol=0)


def test_weights_are_counts() -> None:
    q, k, v = (tokens(5, seed) for seed in range(3))
    part = attend(q, k, v)
    twice = attend(q, torch.cat([k, k, k[:, :2]], 1), torch.cat([v, v, v[:, :2]], 1))
    joined = part.weighted(math.log(2)).joined(attend(q, k[:, :2], v[:, :2]))
    torch.testing.assert_close(joined.mixed, twice.mixed)
    torch.testing.assert_close(joined.total, twice.total)


@pytest.mark.parametrize("dim", [0, 2])
def test_more_than_a_cuda_grid_takes(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images and heads beyond the kernels' limit go in several calls; it is tried here with a limit of three."""
    q, k, v = (torch.randn(8 if dim == 0 else 1, 6, 8 if dim == 2 else 1, 4) for _ in range(3))
    bias = key_bias(torch.rand(len(q), 6) < 0.7, q.dtype)
    whole = attend(q, k, v, bias=bias)
    sizes: list[int] = []
    fused = log_sum_exp._fused_cpu

    def spy(q: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        sizes.append(q.shape[dim and 1])
        return fused(q, *given)

    monkeypatch.setattr(log_sum_exp, "GRID_LIMIT", 3)
    monkeypatch.setattr(log_sum_exp, "GRID_FREE", ())
    monkeypatch.setattr(log_sum_exp, "_fused_cpu", spy)
    torch.testing.assert_close(attend(q, k, v, bias=bias), whole)
    assert sizes == [3, 3, 2]


def test_any_strides() -> None:
    """A kernel that is called directly reads channels that do not lie side by side as if they did."""
    q, k, v = (tokens(9, seed).permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for seed in range(3))
    torch.testing.assert_close(attend(q, k, v), attend(*(x.contiguous() for x in (q, k, v))))


def test_gradients_take_plain_operations() -> None:
    inputs = tuple(tokens(5, seed, size=4).double().requires_grad_() for seed in range(3))
    assert torch.autograd.gradcheck(lambda q, k, v: attend(q, k, v).joined(attend(q, v, k)).mixed, inputs)
    q, k, v = (x.detach().float().requires_grad_() for x in inputs)
    attend(q, k, v).total.sum().backward()
    assert k.grad is not None
    assert k.grad.abs().sum() > 0
