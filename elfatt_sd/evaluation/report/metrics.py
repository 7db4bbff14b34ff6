"""The further metrics of a run, `metrics` of each row, and their table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
from elfatt_sd.evaluation.report.values import Estimate, dig, estimate

_ARROWS = {"higher": " ↑", "lower": " ↓"}


def metric_names(results: Results) -> list[str]:
    """Return the names of all metrics, in order of appearance; those that compare with the untouched images first."""
    names = dict.fromkeys(name for row in results.rows for name in dig(row.data, "metrics") or {})
    return sorted(map(str, names), key=lambda name: not compares(results, name))


def compares(results: Results, name: str) -> bool:
    """Tell whether a metric is how far an image is from the untouched one: it then has no difference and no verdict."""
    return any(dig(row.data, "metrics", name, "compares") for row in results.rows)


def metric(row: Row, name: str) -> Estimate | None:
    """Return the mean of a metric with its interval."""
    return estimate(dig(row.data, "metrics", name))


def metric_difference(row: Row, name: str) -> Estimate | None:
    """Return the paired difference in a metric, this row minus the baseline."""
    return estimate(dig(row.data, "metrics", name, "difference"))


def metric_verdict(row: Row, name: str) -> str | None:
    """Return the verdict on that difference."""
    said = dig(row.data, "metrics", name, "difference", "verdict")
    return None if said is None else str(said)


def judging_metric(results: Results) -> str | None:
    """Return the first metric with verdicts."""
    return next(
        (name for name in metric_names(results) if any(metric_verdict(row, name) for row in results.rows)), None
    )


def metrics_table(results: Results) -> Table | None:
    """Build the table of all metrics; None where there is none."""
    makers: list[tuple[str, Callable[[Row], Entry]]] = []
    for name in metric_names(results):
        better = next((dig(row.data, "metrics", name, "better") for row in results.rows if metric(row, name)), "")
        makers.append((f"{name}{_ARROWS.get(str(better), '')}", _value_maker(results, name)))
        if any(metric_difference(row, name) for row in results.rows):
            get = _getter(metric_difference, name)
            makers.append((f"{name} difference", difference_maker(results, get)))
        if any(metric_verdict(row, name) for row in results.rows):
            makers.append((f"{name} verdict", verdict_maker(_getter(metric_verdict, name))))
    return build_table(results, makers, published=False) if makers else None


def metric_columns(results: Results, row: Row) -> dict[str, Any]:
    """Return a row's figures for the CSV: value and difference with their ends, and the verdict."""
    columns: dict[str, Any] = {}
    for name in metric_names(results):
        for title, found in ((name, metric(row, name)), (f"{name} difference", metric_difference(row, name))):
            value, low, high = (found.value, found.low, found.high) if found else (None, None, None)
            columns |= {title: value, f"{title} low": low, f"{title} high": high}
        columns[f"{name} verdict"] = metric_verdict(row, name)
    return columns


def _value_maker(results: Results, name: str) -> Callable[[Row], Entry]:
    plain = estimate_maker(results, _getter(metric, name))
    return lambda row: plain(row) if metric(row, name) or not compares(results, name) else no_pair(row)


def _getter(get: Callable[[Row, str], Any], name: str) -> Callable[[Row], Any]:
    return lambda row: get(row, name)
