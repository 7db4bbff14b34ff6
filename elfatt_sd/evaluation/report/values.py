"""Values of nested results, and how they are written: what is missing is None."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Estimate:
    """A value with the ends of its interval, where there is one."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def ends(self) -> tuple[float, float] | None:
        """Both ends of the interval, or None."""
        return None if self.low is None or self.high is None else (self.low, self.high)


def dig(data: Any, *path: str) -> Any:
    """Follow keys into nested mappings; None where a level is missing."""
    for key in path:
        if not isinstance(data, Mapping):
            return None
        data = data.get(key)
    return data


def number(data: Any, *path: str) -> float | None:
    """Return the number at the end of a path; None for anything else, NaN included. Infinity is a number."""
    value = dig(data, *path)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:  # a whole number beyond all of float's
        return None
    return None if math.isnan(found) else found


def numbers(data: Any, *path: str) -> list[float]:
    values = dig(data, *path)
    if not isinstance(values, Sequence) or isinstance(values, str):
        return []
    found = (number(value) for value in values)
    return [value for value in found if value is not None and math.isfinite(value)]


def estimate(data: Any, value: str = "value", interval: str = "interval") -> Estimate | None:
    middle, ends = number(data, value), numbers(data, interval)
    if middle is None:
        return None
    return Estimate(middle, ends[0], ends[-1]) if len(ends) >= 2 else Estimate(middle)


def setting_title(name: str) -> str:
    """Write the name of a setting for a reader: `block_size` is "Block size"."""
    return name.replace("_", " ").capitalize()


def setting_text(value: Any) -> str:
    """Write the value of a setting; a dash for one that the method does not have."""
    if value is None:
        return "—"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if isinstance(value, str | int) else json.dumps(value, sort_keys=True, ensure_ascii=False)


def shortened(head: str, tail: str, width: int) -> str:
    """Join two texts within so many characters; the first one is cut, or, where it stands alone, its middle.

    The end is what tells rows apart, so it is kept. Words stay whole where that leaves at least half of a part.
    """
    whole = f"{head} {tail}".strip()
    if len(whole) <= width:
        return whole
    end = f" {tail}" if tail else head[-(width * 2 // 5) :]
    end = end[max(end.find(" ", 0, len(end) // 2), 0) :]
    room = max(width - len(end) - 1, width // 5)
    border = head.rfind(" ", max(room // 2, 8), room + 1)
    start = head[: border if border > 0 else room]
    return f"{start.rstrip(' ,')}…{end[-(width - room - 1) :]}"
