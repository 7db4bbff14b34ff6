"""Try an attention on small random layers, and tell which rule of its contract it breaks."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elfatt_sd.attention.joint import Keys
from elfatt_sd.attention.ordering import Grid
from elfatt_sd.devices import standard_normal
from elfatt_sd.errors import ElfattError
from elfatt_sd.methods.base import Attention, Draws, Merge, Prepared, Size, in_one_line

_GRIDS = (Grid.image(8, 8), Grid.image(5, 7))
_HEADS, _HEAD_DIM, _BATCH = 2, 8, 2


class TrialLayer:
    """A layer with random projections; see `elfatt_sd.methods.Layer`."""

    def __init__(self, tokens: Tensor, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(0)
        channels = _HEADS * _HEAD_DIM
        self._weights = standard_normal((3, channels, channels), generator).div(channels**0.5).to(device)
        self._tokens = tokens
        self.kernel: dict[str, Any] = {"fp32_logits": False, "backend": "native"}
        self.context: Keys | None = None

    def project(self, tokens: Tensor, keys: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        source = tokens if keys is None else tokens.index_select(1, keys)
        return self.queries(tokens), self._split(source, 1), self._split(source, 2)

    def queries(self, tokens: Tensor) -> Tensor:
        return self._split(tokens, 0)

    def merged(self, ratio: float) -> Tensor:
        """Return the first tokens, in place of merged ones."""
        return self._tokens[:, : max(1, round(self._tokens.shape[1] * (1 - ratio)))]

    def _split(self, tokens: Tensor, index: int) -> Tensor:
        return (tokens @ self._weights[index].to(tokens)).view(*tokens.shape[:2], _HEADS, _HEAD_DIM)


def check(attention: Attention) -> None:
    """Try an attention with its settings on small grids; once for equal ones.

    Args:
        attention: to be tried.

    Raises:
        ElfattError: it breaks a rule of `Attention`; the message says which.
    """
    with raises_in_one_line(attention, "hash, which needs settings that do not change, such as numbers and texts"):
        hash(attention)
    _check(attention)


@functools.lru_cache(maxsize=64)
def _check(attention: Attention) -> None:
    if rule := next(_broken_rules(attention), ""):
        raise broken(attention, rule)


def _broken_rules(attention: Attention) -> Iterator[str]:
    with raises_in_one_line(attention, "words"):
        said = attention.words([attention])
    if not isinstance(said, str) or "\n" in said:
        yield f"says itself as {said!r}; return a text of one line from `words`"
    for grid in _GRIDS:
        tokens = standard_normal((_BATCH, grid.tokens, _HEADS * _HEAD_DIM), torch.Generator().manual_seed(1))
        before, states, results = tokens.clone(), _random_states(), list[Tensor]()
        for _ in range(2):
            with raises_in_one_line(attention, "prepare"):
                prepared = attention.prepare(grid, Draws(0, 0, 0, torch.device("cpu")))
            if not (prepared is None or isinstance(prepared, Prepared)):
                yield f"prepares {type(prepared).__name__}; return a Prepared, or None"
            ordered = tokens if prepared is None or prepared.order is None else tokens.index_select(1, prepared.order)
            with raises_in_one_line(attention, "attend"), torch.no_grad():
                results.append(attention.attend(TrialLayer(tokens), ordered, prepared))
        if _random_states() != states:
            yield "draws from the global random state; draw with `draws.uniform`"
        if not torch.equal(tokens, before):
            yield "changes the tokens that it is given"
        check_result(attention, results[0], (_BATCH, grid.tokens, _HEADS, _HEAD_DIM), tokens.dtype)
        if not results[0].isfinite().all():
            yield "returns values that are not finite"
        if not torch.equal(*results):
            yield "gives another result the second time"
        with raises_in_one_line(attention, "cost"):
            cost = attention.fit(grid, Merge()).cost(Size(grid, grid.tokens, _HEADS * _HEAD_DIM))
        if not isinstance(cost, int | float) or not (0 < cost < math.inf or (attention.empty and cost == 0)):
            yield f"has cost {cost!r}; return a number of multiply-adds"
        prepared = attention.prepare(grid, Draws(0, 0, 0, torch.device("meta")))
        empty = torch.empty(tokens.shape, dtype=torch.float32, device="meta")
        try:  # what reads a value waits for the device
            attention.attend(TrialLayer(empty, "meta"), empty, prepared)
        except Exception as error:
            reads = "meta" in str(error) or "item" in str(error)
            why = f"raises without values ({type(error).__name__})"
            yield "reads values of tensors on the host, which waits for the device" if reads else why


def check_result(attention: Attention, result: object, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    rule = ""
    if not isinstance(result, Tensor):
        rule = f"returns {type(result).__name__}; return a tensor"
    elif tuple(result.shape) != shape:
        rule = f"returns shape {list(result.shape)}; return {list(shape)}, as the queries"
    elif result.dtype != dtype:
        rule = f"returns {result.dtype}; return the queries' {dtype}"
    if rule:
        raise broken(attention, rule)


def raises_in_one_line(attention: Attention, what: str) -> AbstractContextManager[None]:
    return in_one_line(f"{_named(attention)} raises in {what}")


def broken(attention: Attention, rule: str) -> ElfattError:
    return ElfattError(f"{_named(attention)} {rule}.")


def _named(attention: Attention) -> str:
    kind = type(attention)
    return f"attention {kind.name!r} ({kind.__module__}:{kind.__qualname__})"


def _random_states() -> tuple[object, ...]:
    name, keys, *rest = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), name, np.asarray(keys).tobytes(), *rest
