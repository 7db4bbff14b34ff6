"""The further metrics of a run, `metrics` of each row, and their table."""

from __future__ import annotations

import functools
from collections.abc import Callable

from elfatt_sd.evaluation.report.data import Results
from elfatt_sd.evaluation.report.rows import Row
from elfatt_sd.evaluation.report.tables import (
    Entry,
    Table,
    build_table,
    difference_maker,
    estimate_maker,
    no_pair,
    verdict_maker,
)
from elfatt_sd.evaluation.report.values import dig

_ARROWS = {"higher": " ↑", "lower": " ↓"}


def metric_names(results: Results) -> list[str]:
    names = dict.fromkeys(name for row in results.rows for name in dig(row.data, "metrics") or {})
    return sorted(map(str, names), key=lambda name: not compares(results, name))


def compares(results: Results, name: str) -> bool:
    return any(dig(row.data, "metrics", name, "compares") for row in results.rows)


def metrics_table(results: Results) -> Table | None:
    """Build the table of all metrics; None where there is none."""
    makers: list[tuple[str, Callable[[Row], Entry]]] = []
    for name in metric_names(results):
        better = next((dig(row.data, "metrics", name, "better") for row in results.rows if row.metric(name)), "")
        makers.append((f"{name}{_ARROWS.get(str(better), '')}", _value_maker(results, name)))
        difference = functools.partial(Row.difference, name=name, of="metrics")
        verdict = functools.partial(Row.verdict, name=name, of="metrics")
        if any(difference(row) for row in results.rows):
            makers.append((f"{name} difference", difference_maker(results, difference)))
        if any(verdict(row) for row in results.rows):
            makers.append((f"{name} verdict", verdict_maker(verdict)))
    return build_table(results, makers, published=False) if makers else None


def _value_maker(results: Results, name: str) -> Callable[[Row], Entry]:
    plain = estimate_maker(results, lambda row: row.metric(name))
    return lambda row: plain(row) if row.metric(name) or not compares(results, name) else no_pair(row)
