"""The pure part: weights, sets of keys, errors, points."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from elfatt_sd.attention.joint import Keys, exact_attention
from elfatt_sd.attention.softmax import block_attention, softmax_attention
from elfatt_sd.visualize import looks

SHAPE = (1, 12, 2, 8)


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SHAPE, generator=generator) for _ in range(3)]


def exact(q: Tensor, k: Tensor, v: Tensor, context: Keys | None) -> Tensor:
    return exact_attention(q, [Keys(k, v), *([context] if context else [])])


def test_weights_are_those_of_softmax_also_beside_text() -> None:
    q, k, _ = tensors()
    text = Keys(*(x[:, :5] for x in tensors()[1:]))
    for context in (None, text, text._replace(mask=torch.tensor([[True, True, False, True, False]]))):
        weights, beside = looks.weights_of(exact, q, k, context, 3)
        expected, text_part = looks.exact_weights(q[0, 3], k[0], context)
        np.testing.assert_allclose(weights, expected, atol=1e-6)
        np.testing.assert_allclose(beside, text_part, atol=1e-6)
        np.testing.assert_allclose(weights.sum(-1) + beside, 1, atol=1e-6)


def test_weights_give_the_output_again() -> None:
    q, k, v = tensors()

    def attend(q: Tensor, k: Tensor, v: Tensor, context: Keys | None) -> Tensor:
        return block_attention(q, k, v, 4)

    weights, _ = looks.weights_of(attend, q, k, None, 5)
    mixed = torch.einsum("hn,nhd->hd", torch.from_numpy(weights).float(), v[0])
    torch.testing.assert_close(mixed, block_attention(q, k, v, 4)[0, 5])
    assert (weights != 0).sum(-1).tolist() == [4, 4]


def test_queries_that_see_the_same_keys_are_found_whatever_is_added_of_their_own_value() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, context: Keys | None) -> Tensor:
        first = block_attention(q[:, :, :1], k[:, :, :1], v[:, :, :1], 4) + 0.3 * v[:, :, :1]
        return torch.cat([first, softmax_attention(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:])], 2)

    blocks, everything = looks.same_keys(attend, SHAPE, None, torch.zeros(1))
    assert blocks is not None and everything is not None
    assert blocks.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert set(everything) == {0}
    assert looks.head_groups([blocks, everything, blocks]) == [(0, 2), (1,)]


def test_too_many_sets_are_not_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "MOST_SETS", 11)
    rows = np.arange(13.0)[:, None]
    assert looks._alike(rows) is None and looks._alike(rows[:10]) is not None


def test_errors_are_relative_to_the_exact_output() -> None:
    reference = torch.tensor([[3.0, 4.0], [0.0, 5.0]])
    error, relative = looks.errors(reference + torch.tensor([[0.0, 5.0], [0.0, 0.0]]), reference)
    np.testing.assert_allclose(error, [1, 0])
    assert relative == pytest.approx(0.5**0.5)


def test_names() -> None:
    nothing = np.zeros(2)
    names = [looks.Heads(numbers, None, nothing, nothing).name for numbers in ((0,), (0, 1, 2), (0, 2))]
    assert names == ["head 1", "heads 1 to 3", "heads 1, 3"]
    grouping = looks.Grouping("merge into one", np.array([0, 1, 0, 2]))
    assert grouping.sizes.tolist() == [2, 1, 2, 1] and grouping.count == 3
