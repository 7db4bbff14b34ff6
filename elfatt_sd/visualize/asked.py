"""What to look at, checked without PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from elfatt_sd.errors import ElfattError


@dataclass(frozen=True)
class Asked:
    """What to look at; see `watch`."""

    layer: str | None = None  # path of a layer, or a pattern; None takes the first one on the finest grid
    step: int | None = None  # from 1; None takes one of each phase
    # the point of the image whose query is followed, fractions of width and height
    at: tuple[float, float] = (0.5, 0.5)

    def __post_init__(self) -> None:
        if self.step is not None and self.step < 1:
            raise ElfattError(f"step={self.step} is not accepted; give a whole number of at least 1.")
        if len(self.at) != 2 or not all(0 <= part <= 1 for part in self.at):
            raise ElfattError(f"at={self.at!r} is not accepted; give two fractions from 0 to 1, such as 0.5,0.5.")

    @classmethod
    def read(cls, layer: str | None, step: int | None, at: str) -> Self:
        """Build it from options; `at` is `X,Y`."""
        try:
            point = tuple(map(float, at.split(",")))
        except ValueError:
            point = ()
        return cls(layer, step, point)  # type: ignore[arg-type]
