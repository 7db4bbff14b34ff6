"""What another package's accelerator is, as a row of an evaluation or a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import nn

Models = Literal["unet", "transformer"]


@dataclass(frozen=True)
class Peer:
    """An accelerator that a user could pick instead."""

    name: str  # of it, in protocols and tables
    package: str  # that has it, as `elfatt_sd.errors` names it; empty for diffusers itself
    what: str  # it does, in a few words
    models: Models  # that it speeds up
    settings: Mapping[str, Any]  # their names, with what holds where nobody gives others
    # `on(pipe, **settings)` puts it on a pipeline for the length of a `with` block
    on: Callable[..., AbstractContextManager[None]]
    joins: bool = False  # whether a patch can be on together with it; otherwise it takes the patch's place


def tidy(module: nn.Module) -> None:
    """Take out methods of a module and its parts that a package has put back as attributes of the objects."""
    for part in module.modules():
        own: Any = part.__dict__.get("forward")
        if getattr(own, "__self__", None) is part and own.__func__ is getattr(type(part), "forward", None):
            del part.forward
