"""What was measured in layers as plain data, and back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from elfatt_sd.phases import Phase
from elfatt_sd.tuning.probe import LayerFigures

_TABLES = ("ratios", "plain", "shared", "guided", "effects")


def figures_to(figures: Mapping[str, LayerFigures]) -> dict[str, Any]:
    """Return figures as plain data, ready for JSON."""
    return {name: _to_dict(own) for name, own in figures.items()}


def figures_from(data: Mapping[str, Any]) -> dict[str, LayerFigures]:
    """Return figures from what `figures_to` gave.

    Raises:
        LookupError: there are none.
    """
    if not data:
        raise LookupError("no layer was measured")
    return {name: _from_dict(own) for name, own in data.items()}


def _to_dict(own: LayerFigures) -> dict[str, Any]:
    tables = {name: {_key(key): values for key, values in getattr(own, name).items()} for name in _TABLES}
    return {
        "bases": [phase.to_dict() for phase in own.bases],
        "lost": sorted(own.lost),
        "fresh": sorted(own.fresh),
        "seconds": own.seconds,
        "calls": own.calls,
        "copies": own.copies,
        **tables,
    }


def _from_dict(data: Mapping[str, Any]) -> LayerFigures:
    bases, numbers = list(map(Phase.from_dict, data["bases"])), (set(data["lost"]), set(data["fresh"]))
    figures = LayerFigures(bases, *numbers, data["seconds"], data["calls"], data["copies"])
    for name in _TABLES:
        table: Any = defaultdict(list, {_unkey(key): values for key, values in data[name].items()})
        setattr(figures, name, table)
    return figures


def _key(key: Any) -> str:
    return "/".join(map(str, key if isinstance(key, tuple) else (key,)))


def _unkey(key: str) -> Any:
    parts = tuple(map(int, key.split("/")))
    return parts if len(parts) > 1 else parts[0]
