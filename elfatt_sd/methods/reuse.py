"""The output of an earlier step in place of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from elfatt_sd.methods.base import Attention, Layer, Size

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Reuse(Attention):
    """The layer's output in the first of the steps of `residual_steps`, which is exact, serves the others as well.

    It approximates by nothing: what the steps share is the whole output (pyramid attention broadcast, arXiv:2408.12588,
    for self-attention alone). Layers that join image and text reuse what the image attends to.
    """

    name: ClassVar[str] = "reuse"
    merges: ClassVar[bool] = False
    joint: ClassVar[bool] = True
    empty: ClassVar[bool] = True

    def attend(self, layer: Layer, tokens: Tensor, prepared: Any) -> Tensor:
        """Return zeros; only what times or checks a single call asks for them."""
        return layer.queries(tokens).mul(0)

    @property
    def is_random(self) -> bool:
        """Nothing is drawn."""
        return False

    def cost(self, size: Size) -> float:
        """Nothing is computed."""
        return 0

    def words(self, fitted: Sequence[Self]) -> str:
        """Name it."""
        return "no attention"
