"""Attentions, and their registry: the package's own and those that others add."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Iterable, Iterator
from typing import Literal, TypeVar

from elfatt_sd.attention.ordering import Grid as Grid
from elfatt_sd.errors import ElfattError
from elfatt_sd.methods.base import Attention as Attention
from elfatt_sd.methods.base import Draws as Draws
from elfatt_sd.methods.base import Layer as Layer
from elfatt_sd.methods.base import Merge as Merge
from elfatt_sd.methods.base import Prepared as Prepared
from elfatt_sd.methods.base import Size as Size
from elfatt_sd.methods.base import in_one_line
from elfatt_sd.methods.published import Agents
from elfatt_sd.methods.published import Blocks as Blocks
from elfatt_sd.methods.published import Elfatt as Elfatt
from elfatt_sd.methods.published import Softmax as Softmax
from elfatt_sd.methods.sampled import CellSpread as CellSpread
from elfatt_sd.methods.sampled import Reuse
from elfatt_sd.methods.sampled import Sampled as Sampled

Kind = TypeVar("Kind", bound=type[Attention])
AttentionName = Literal["softmax", "agent", "block", "elfatt", "cell_spread", "sampled", "reuse"]
_OWN: tuple[type[Attention], ...] = (Softmax, Agents, Blocks, Elfatt, CellSpread, Sampled, Reuse)
_known: dict[str, type[Attention]] = {kind.name: kind for kind in _OWN}
_RESERVED = {field.name for field in dataclasses.fields(Merge)}  # that mean something in every method; see `reserve`
_TAKEN: set[str] = set()  # names of methods, by `reserve`


def attentions() -> dict[str, type[Attention]]:
    """Return all known attentions by name, the package's own first."""
    return dict(_known)


def is_own(kind: type[Attention]) -> bool:
    return kind in _OWN


def register(kind: Kind) -> Kind:
    """Make an attention of your own known by its name, wherever a method is named; also usable as a decorator.

    A class of the same module and name takes the place of the one before, as when a cell of a notebook is run again.

    Args:
        kind: a frozen dataclass derived from `elfatt_sd.methods.Attention`; see there.

    Returns:
        The class.

    Raises:
        ElfattError: the class has no name or one that is taken, or a field that does not fit in.
    """
    if not (isinstance(kind, type) and issubclass(kind, Attention)):
        raise ElfattError(f"{kind!r} cannot be registered; give a class derived from elfatt_sd.methods.Attention.")
    if problem := next(_problems(kind), ""):
        raise ElfattError(f"{kind.__module__}:{kind.__qualname__} cannot be registered: {problem}.")
    with in_one_line(f"attention {kind.name!r} does not accept its defaults"):
        kind()
    _known[kind.name] = kind
    return kind


def attention_named(name: object) -> type[Attention]:
    """Return an attention by its name; `package.module:Class` is imported and registered first."""
    if isinstance(name, str) and ":" in name:
        module, _, attribute = name.partition(":")
        remedy = "give package.module:Class of what is installed or on PYTHONPATH"
        with in_one_line(f"method={name!r} cannot be imported; {remedy}"):
            kind = getattr(importlib.import_module(module), attribute)
        known: type[Attention] = kind if kind in _known.values() else register(kind)
        return known
    if not isinstance(name, str) or name not in _known:
        raise ElfattError(
            f"attention={name!r} is not known; accepted: {', '.join(_known)}. For one of your own, call "
            "elfatt_sd.register first."
        )
    return _known[name]


def _problems(kind: type[Attention]) -> Iterator[str]:
    def plain(name: str) -> str:  # names that differ in case or dashes alone would share files of a run
        return name.casefold().replace("-", "_")

    if not isinstance(kind.__dict__.get("name"), str) or not kind.name.replace("-", "_").isidentifier():
        yield f"its name is {kind.name!r}; give a `name` of letters, digits and underscores"
    taken = {} if is_own(kind) else {plain(name): f"the method {name!r}" for name in sorted(_TAKEN)}
    others = [(other.name, (other.__module__, other.__qualname__)) for other in _known.values()]
    own = kind.__module__, kind.__qualname__  # a class may be declared again, as in a notebook
    taken |= {plain(name): ":".join(place) for name, place in others if place != own}
    if plain(kind.name) in taken:
        yield f"the name {kind.name!r} is taken by {taken[plain(kind.name)]}; give another one"
    if "__dataclass_params__" not in kind.__dict__ or not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        yield "it is not a frozen dataclass; put @dataclass(frozen=True) above it"
    for missing in ("attend", "cost"):
        if getattr(kind, missing) is getattr(Attention, missing):
            yield f"it has no method {missing}; see elfatt_sd.methods.Attention.{missing}"
    for field in dataclasses.fields(kind):
        if field.name in _RESERVED:
            yield f"its field {field.name!r} means something else in every method; rename it"
        value = field.default  # a default that a factory makes would be a list or the like, which settings cannot be
        if not (value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))):
            yield (
                f"the default of its field {field.name!r} is not one that JSON can hold; give a number, a text, True, "
                "False or None"
            )


def reserve(methods: Iterable[str], fields: Iterable[str]) -> None:
    """Keep names of methods and of settings from attentions of others."""
    _TAKEN.update(methods)
    _RESERVED.update(fields)
