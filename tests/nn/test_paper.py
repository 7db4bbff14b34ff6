"""The paper's own figures and formulas: operations and parameters of its backbones, its equations, its bound."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from elfatt_sd.attention.softmax import efficient_attention
from elfatt_sd.nn import ElfattAttention, pyramid

ALL196, AT384 = {"block_size": (196, 196, 196, 49)}, {"block_size": (576, 576, 576, 144)}
APART = {"overlap": False}
COUNTS = [  # tables 1 and tabab1 to tabab5: giga-operations without and with FlashAttention-2, millions of parameters
    ("cswin-t", "elfatt", 224, {}, 4.44, 4.13, 20),
    ("cswin-b", "elfatt", 224, {}, 15.47, 14.46, 73),
    ("cswin-b", "elfatt", 384, AT384, 51.21, 42.48, 73),
    ("swin-t", "elfatt", 224, {}, 4.99, 4.67, 30),
    ("swin-b", "elfatt", 224, {}, 16.46, 15.68, 91),
    ("swin-b", "elfatt", 384, AT384, 52.79, 46.08, 91),
    ("cswin-t", "softmax", 224, {}, 7.60, 4.09, 20),
    ("cswin-b", "softmax", 224, {}, 22.33, 14.39, 73),
    ("cswin-b", "softmax", 384, {}, 110.89, 42.28, 73),
    ("cswin-t", "effatt", 224, {}, 4.35, 4.17, 20),
    ("cswin-b", "effatt", 224, {}, 14.98, 14.53, 73),
    ("cswin-b", "effatt", 384, {}, 46.57, 42.69, 73),
    ("swin-t", "effatt", 224, APART, 4.55, 4.45, 28),
    ("swin-b", "effatt", 224, APART, 15.69, 15.32, 88),
    ("swin-b", "effatt", 384, APART, 48.17, 45.03, 88),
    ("swin-t", "softmax", 224, APART, 8.81, 4.38, 28),
    ("swin-b", "softmax", 224, APART, 21.57, 15.19, 88),
    ("swin-b", "softmax", 384, APART, 99.76, 44.64, 88),
    ("cswin-t", "elfatt", 224, {"block_size": 49}, 4.37, 4.13, 20),
    ("cswin-t", "elfatt", 224, {"block_size": (49, 196, 196, 49)}, 4.50, 4.13, 20),
    ("cswin-t", "elfatt", 224, ALL196, 4.56, 4.13, 20),
    ("cswin-t", "elfatt", 224, {**ALL196, "lepe": False}, 4.54, 4.12, 20),
    ("cswin-t", "softmax", 224, {"lepe": False}, 7.58, 4.08, 20),
    ("cswin-t", "elfatt", 224, {**ALL196, "every": (1, 0, 0, 0)}, 5.17, 4.10, 20),
    ("cswin-t", "elfatt", 224, {**ALL196, "every": (1, 1, 0, 0)}, 4.63, 4.12, 20),
    ("cswin-t", "elfatt", 224, {**ALL196, "every": (1, 1, 1, 0)}, 4.48, 4.15, 20),
    ("cswin-t", "elfatt", 224, {**ALL196, "every": (1, 1, 1, 1)}, 4.48, 4.15, 20),
    ("cswin-t", "elfatt", 224, {**ALL196, "global_fraction": 0.0}, 4.76, 4.09, 20),
    ("cswin-t", "elfatt", 224, {**ALL196, "global_fraction": 0.25}, 4.65, 4.10, 20),
]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Multiply-adds of what is called from now on, on the meta device; a norm is 5 for each value, as fvcore counts."""
    count = {"exact": 0, "others": 0}

    def linear(x: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
        count["others"] += x.numel() * len(weight)
        return x.new_empty(*x.shape[:-1], len(weight))

    def conv2d(
        x: Tensor, weight: Tensor, bias: Any, stride: Any = 1, padding: Any = 0, *_: Any, groups: int = 1
    ) -> Any:
        stride, padding = (each if isinstance(each, int) else each[0] for each in (stride, padding))
        sides = [(side + 2 * padding - weight.shape[2]) // stride + 1 for side in x.shape[2:]]
        count["others"] += len(x) * weight.numel() * math.prod(sides)
        return x.new_empty(len(x), len(weight), *sides)

    def norm(x: Tensor, *_: Any) -> Tensor:
        count["others"] += 5 * x.numel()
        return x

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, **_: Any) -> Tensor:
        products = q[..., 0].numel() * k.shape[2] * v.shape[3]
        if scale == 1.0:  # unit vectors are not multiplied with
            count["others"] += products
        else:
            count["exact"] += 2 * products
        return q.new_empty(*q.shape[:3], v.shape[3])

    for name, stands_in in (("linear", linear), ("conv2d", conv2d), ("layer_norm", norm)):
        monkeypatch.setattr(F, name, stands_in)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    return count


@pytest.mark.parametrize(("name", "attention", "side", "settings", "all_of_it", "with_flash", "millions"), COUNTS)
def test_operations_and_parameters_are_the_papers(
    name: str,
    attention: str,
    side: int,
    settings: dict[str, Any],
    all_of_it: float,
    with_flash: float,
    millions: int,
    counted: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Within 0.5 %: the paper's column with FlashAttention-2 leaves the products of exact attention out."""
    monkeypatch.setattr(torch.nn.init, "trunc_normal_", lambda *_, **__: None)
    with torch.device("meta"):
        model = pyramid(name, attention, **settings)
        model(torch.empty(1, 3, side, side))
    assert counted["others"] / 1e9 == pytest.approx(with_flash, rel=0.005)
    assert sum(counted.values()) / 1e9 == pytest.approx(all_of_it, rel=0.005)
    assert round(sum(each.numel() for each in model.parameters()) / 1e6) == millions


def dense(module: ElfattAttention, x: Tensor, sides: tuple[int, int], windows: tuple[int, int]) -> Tensor:
    """Equations lepe1 and lepe2 as they stand, normalised: pair by pair, window by window."""
    first, heads = module.prefix_tokens, module.num_heads
    q, k, v = module.qkv(x).unflatten(2, (3, heads, -1)).unbind(2)
    split = {0: 2, 1: 3}[heads % 2]  # an odd number of heads divides the channels
    weights = [each.unflatten(0, (heads, -1)) for each in (module.lepe.weight, module.lepe.bias)]
    (qa, qb), (ka, kb), (va, vb) = (each.chunk(2, split) for each in (q, k, v))
    (wa, wb), (ba, bb) = (each.chunk(2, split - 2) for each in weights)

    def convolved(tokens: Tensor, height: int, weight: Tensor, bias: Tensor) -> Tensor:
        image = tokens.flatten(2).unflatten(1, (height, -1)).permute(0, 3, 1, 2)
        made = F.conv2d(image, weight.flatten(0, 1), bias.flatten(), padding=1, groups=image.shape[1])
        return made.flatten(2).transpose(1, 2).view(tokens.shape)

    def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = torch.einsum("bnhd,bmhd->bhnm", q, k) / math.sqrt(q.shape[3])
        return torch.einsum("bhnm,bmhd->bnhd", logits.softmax(3), v)

    mixed = [torch.einsum("bnhd,bmhd,bmhe->bnhe", qa.softmax(3), ka.softmax(1), va), torch.empty_like(vb)]
    mixed[0][:, first:] += convolved(va[:, first:], sides[0], wa, ba)
    places = torch.arange(math.prod(sides)).view(sides) + first
    for band in places.tensor_split(windows[0], 0):
        for window in band.tensor_split(windows[1], 1):
            own = window.flatten()
            seen = torch.cat([torch.arange(first), own])
            mixed[1][:, own] = softmax(qb[:, own], kb[:, seen], vb[:, seen])
            mixed[1][:, own] += convolved(vb[:, own], len(window), wb, bb)
    out = torch.cat(mixed, split)
    out[:, :first] = softmax(q[:, :first], k, v)
    return module.proj(out.flatten(2))


@pytest.mark.parametrize(
    ("heads", "sides", "block", "windows", "first"),
    [
        (4, (8, 12), 16, (2, 3), 0),
        (3, (8, 12), 16, (2, 3), 1),  # equation lepe1
        (2, (7, 5), 4, (4, 2), 5),  # four shapes of windows
        (2, (1, 50), 16, (1, 3), 0),
        (2, (37, 37), 64, (5, 4), 1),  # DINOv2 at 518 pixels
        (1, (3, 2), 49, (1, 1), 2),
    ],
)
def test_the_module_is_the_papers_equations(
    heads: int, sides: tuple[int, int], block: int, windows: tuple[int, int], first: int
) -> None:
    settings: Any = {"block_size": block, "prefix_tokens": first, "grid": sides, "dtype": torch.float64}
    module = ElfattAttention(heads * 8, heads, True, **settings)
    x = torch.randn(2, first + math.prod(sides), heads * 8, dtype=torch.float64)
    torch.testing.assert_close(module(x), dense(module, x, sides, windows))
    if not first:
        torch.testing.assert_close(module(x.view(2, *sides, -1)).flatten(1, 2), module(x))


@pytest.mark.parametrize("kind", ["effatt", "agent", "focused"])
def test_gradients_are_right(kind: str) -> None:
    ones = torch.ones(2, 9, 3, 4, dtype=torch.float64)
    torch.testing.assert_close(efficient_attention(*torch.randn(2, *ones.shape, dtype=torch.float64), ones), ones)
    settings: Any = {"block_size": 4, "prefix_tokens": 1, "grid": (3, 4), "agents": 4, "dtype": torch.float64}
    module = ElfattAttention(8, 2, global_heads=kind, **settings)
    assert torch.autograd.gradcheck(module, torch.randn(1, 13, 8, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("norm", [2, "fro"])
@pytest.mark.parametrize("scale", [0.1, 0.3, 1.0])
def test_the_error_stays_below_the_papers_bound(norm: Any, scale: float) -> None:
    """elfatterr4-1 and elfatterr4-2, which are of attention without a denominator."""
    for _ in range(10):
        tokens, channels, blocks = 12, 4, 3
        (qa, qb), (ka, kb), (va, vb) = torch.randn(3, 2, tokens, channels, dtype=torch.float64) * scale
        near = torch.block_diag(*[torch.ones(tokens // blocks, tokens // blocks, dtype=torch.float64)] * blocks)
        exact = torch.cat([(qa @ ka.T).exp() @ va, (qb @ kb.T).exp() @ vb], 1)
        made = torch.cat([qa.exp() @ ka.exp().T @ va, (near * (qb @ kb.T).exp()) @ vb], 1)
        ratio = ((qa @ ka.T)[:, :, None] + 0.5 - qa[:, None] - ka[None]).exp()
        worst = max(abs(channels / (each.item() * math.exp(-0.5)) - 1) for each in (ratio.min(), ratio.max()))
        size = lambda x: torch.linalg.matrix_norm(x, norm)  # noqa: E731
        bound = worst * size((qa @ ka.T).exp()) * size(va) + size(near - 1) * size((qb @ kb.T).exp()) * size(vb)
        assert size(exact - made) <= bound
