"""Exact attention: `softmax(s Q K^T) V`, as the untouched model has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from elfatt_sd.methods.base import Attention, Layer, Size

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Softmax(Attention):
    """Exact attention among the tokens that merging leaves, `softmax(s Q K^T) V`: ToMe (arXiv:2303.17604)."""

    name: ClassVar[str] = "softmax"
    exact: ClassVar[bool] = True
    joint: ClassVar[bool] = True

    def attend(self, layer: Layer, tokens: Tensor, prepared: Any) -> Tensor:
        """Attend through a fused kernel."""
        from elfatt_sd.attention import softmax_attention
        from elfatt_sd.joint import Keys, exact_attention

        q, k, v = layer.project(tokens)
        if layer.context is None:
            return softmax_attention(q, k, v, **layer.kernel)
        return exact_attention(q, [Keys(k, v), layer.context])

    @property
    def is_random(self) -> bool:
        """Nothing is drawn."""
        return False

    def cost(self, size: Size) -> float:
        """Every query of the image meets every key."""
        pairs = size.tokens * (size.tokens + size.context)
        return size.projections(size.tokens, size.tokens) + 2 * pairs * size.channels

    def words(self, fitted: Sequence[Self]) -> str:
        """Name it."""
        return "softmax attention"

    @property
    def family(self) -> str:
        """What is left when tokens are merged before it."""
        return "merging (ToMe)"
