"""Results for people at a terminal: tables that fit 80 columns, what is noise, and a conclusion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from elfatt_sd.benchmarking.conclusion import conclude
from elfatt_sd.benchmarking.names import legend
from elfatt_sd.benchmarking.rows import Results, beats_its_floor
from elfatt_sd.benchmarking.tables import clock, groups, lost, parts, scaled, spread

WIDE = 110  # columns from which on every figure is shown


def show(results: Results, console: Console) -> None:
    """Print results, and at the end what they say."""
    rows = results["rows"]
    for name, own in groups(rows).items():
        console.print(_speeds(name, own, results["bases"], console.width >= WIDE))
    for line in _remarks(results):
        console.print(Text(line))
    for line in conclude(results) if rows else ():
        console.print(Text(line, style="bold"))


def _speeds(name: str, rows: Sequence[Mapping[str, Any]], bases: Sequence[str], wide: bool) -> Table:
    bases = [base for base in bases if any(base in row["speed"] for row in rows)][: None if wide else 1]
    floors = any(row["floor"] for row in rows)
    peaks = any(row["peak_bytes"] is not None for row in rows)
    growth = wide and any(row["bytes_per_picture"] is not None for row in rows)
    table = Table(title=name, title_justify="left", box=SIMPLE)
    table.add_column("method", overflow="fold")
    for head in ["time", *(f"times as fast\nas {base}" for base in bases)]:
        table.add_column(head, justify="right", no_wrap=True)
    heads = ["times\nits floor"] * floors + ["peak\nMiB"] * peaks + ["GB for\n+1 image"] * growth
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        several = parts(row, indent="  ")
        for each in (row, *several * (len(several) > 1)):
            cells = [clock(each["seconds"]), *(spread(each["speed"].get(base)) for base in bases)]
            cells += [_floor(each)] * floors
            cells += [scaled(each.get("peak_bytes"), 2**20, 0)] * peaks
            cells += [scaled(each.get("bytes_per_picture"), 1e9, 3)] * growth
            style = "yellow" if beats_its_floor(each) else "" if each is row else "dim"
            table.add_row(*map(Text, [each["method"], *cells]), style=style)
    return table


def _floor(row: Mapping[str, Any]) -> str:
    return "" if row["floor"] is None else f"{row['floor']['median']:.2f}{'*' * beats_its_floor(row)}"


def _remarks(results: Results) -> Iterator[str]:
    rows = results["rows"]
    if any(beats_its_floor(each) for row in rows for each in (row, *row.get("parts", ()))):
        yield "* faster than its floor: noise, repeat with more rounds."
    if named := legend({row["method"] for row in rows}):
        yield named.replace("`", "")
    yield from lost(results)
