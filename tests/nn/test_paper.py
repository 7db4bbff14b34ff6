"""The paper's own figures and formulas: operations and parameters of its backbones, its equations, its bound."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from elfatt_sd.nn import pyramid

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
