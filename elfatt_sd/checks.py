"""Checks of single values that come from a user; every message names the value and what is accepted."""

from __future__ import annotations

import math
from collections.abc import Collection

from elfatt_sd.errors import ElfattError


def choice(name: str, value: object, accepted: Collection[str]) -> None:
    """Check that a value is one of some words."""
    if value not in accepted:
        raise ElfattError(f"{name}={value!r} is not known; accepted: {', '.join(accepted)}.")


def whole(name: str, value: object, low: int, high: int | None = None) -> None:
    """Check that a value is a whole number in a range."""
    valid = isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high)
    if not valid:
        span = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ElfattError(f"{name}={value!r} is not accepted; give a whole number {span}.")


def real(name: str, value: object, low: float, high: float, *, open_high: bool = False) -> None:
    """Check that a value is a number in a range, `high` included or not."""
    valid = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not valid or not low <= value <= high or (open_high and value == high):  # type: ignore[operator]
        span = f"from {low:g} to less than {high:g}" if open_high else f"from {low:g} to {high:g}"
        raise ElfattError(f"{name}={value!r} is not accepted; give a number {span}.")


def flag(name: str, value: object) -> None:
    """Check that a value is True or False."""
    if not isinstance(value, bool):
        raise ElfattError(f"{name}={value!r} is not accepted; give True or False.")
