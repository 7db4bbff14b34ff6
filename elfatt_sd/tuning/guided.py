"""What guidance makes of the rows of a batch: an error is measured in that, as the image is drawn from it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Guidance(NamedTuple):
    """How a denoiser is guided."""

    scale: float | None = None  # of guidance
    # of the same latents among the rows of a call: 2 where those without the prompt come first, and those with it last.
    # Other numbers, or no scale, leave all rows as they are.
    copies: int = 1

    @property
    def joins(self) -> bool:
        return self.copies == 2 and self.scale is not None

    def joined(self, output: Any) -> Tensor:
        """Return `(1 - scale) without + scale with` of what a layer or a denoiser gave, as float32 without shape.

        An error that both rows have in common counts once; that of one alone counts by the square of its factor.
        """
        if not self.joins or self.scale is None:
            return flat(output)
        without, given = self._halves(output)
        return torch.lerp(without, given, self.scale)

    def given(self, output: Any) -> Tensor:
        return self._halves(output)[1] if self.joins else flat(output)

    def _halves(self, output: Any) -> list[Tensor]:
        parts = [each.detach().float().chunk(2) for each in _tensors(output)]
        return [torch.cat([part[half].flatten() for part in parts]) for half in (0, 1)]


def flat(output: Any) -> Tensor:
    return torch.cat([each.detach().float().flatten() for each in _tensors(output)])


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, tuple | list):
        return [tensor for each in output if each is not None for tensor in _tensors(each)]
    return _tensors(output.sample)
