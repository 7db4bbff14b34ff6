"""Results for people: tables that fit a terminal, a conclusion, and files of results as pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elfatt_sd.benchmarking.names import COMPILED, is_reference, legend
from elfatt_sd.benchmarking.plots import plot, save
from elfatt_sd.benchmarking.record import Results, beats_its_floor
from elfatt_sd.benchmarking.tables import clock, groups, lost, markdown, parts, scaled, spread
from elfatt_sd.devices import short_commit
from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.protocols import FEW_REPEATS
from elfatt_sd.files import atomic_file, link, place_of, read_typed, write_file

if TYPE_CHECKING:  # the suite for GPUs runs on machines without it
    from rich.console import Console
    from rich.table import Table

Row = Mapping[str, Any]
WIDE = 110  # columns from which on every figure is shown
MOST_GROUPS = 3  # that have sentences: the last ones, which are the largest


def show(results: Results, console: Console) -> None:
    """Print results, and at the end what they say."""
    from rich.text import Text

    rows = results["rows"]
    for name, own in groups(rows).items():
        console.print(_speeds(name, own, results["bases"], console.width >= WIDE))
    for line in _remarks(results):
        console.print(Text(line))
    for line in conclude(results) if rows else ():
        console.print(Text(line, style="bold"))


def _speeds(name: str, rows: Sequence[Row], bases: Sequence[str], wide: bool) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

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
            floor = "" if each["floor"] is None else f"{each['floor']['median']:.2f}{'*' * beats_its_floor(each)}"
            cells += [floor] * floors
            cells += [scaled(each.get("peak_bytes"), 2**20, 0)] * peaks
            cells += [scaled(each.get("bytes_per_picture"), 1e9, 3)] * growth
            style = "yellow" if beats_its_floor(each) else "" if each is row else "dim"
            table.add_row(*map(Text, [each["method"], *cells]), style=style)
    return table


def _remarks(results: Results) -> Iterator[str]:
    rows = results["rows"]
    if any(beats_its_floor(each) for row in rows for each in (row, *row.get("parts", ()))):
        yield "* faster than its floor: noise, repeat with more rounds."
    if named := legend({row["method"] for row in rows}):
        yield named.replace("`", "")
    yield from lost(results)


def conclude(results: Results) -> list[str]:
    named = list(groups(results["rows"]).items())[-MOST_GROUPS:]
    return [f"{name}: {' '.join(_sentences(rows, results['bases']))}" for name, rows in named]


def _sentences(rows: Sequence[Row], bases: Sequence[str]) -> Iterator[str]:
    base = next((base for base in bases if any(base in row["speed"] for row in rows)), None)
    ours = [row for row in rows if row["method"] not in bases and not is_reference(row["method"])]
    if base is None or not ours:
        yield "nothing was timed that could be compared."
        return
    speeds = {row["method"]: row["speed"].get(base + COMPILED * row["method"].endswith(COMPILED)) for row in ours}
    speeds = {name: speed or row["speed"][base] for (name, speed), row in zip(speeds.items(), ours, strict=True)}
    best = max(ours, key=lambda row: row["speed"][base]["median"])
    yield from _fastest(best, base)
    losers = {name: speed for name, speed in speeds.items() if speed["median"] <= 1}
    if losers:
        yield f"Does not pay: {', '.join(f'{name} {spread(speed)}' for name, speed in losers.items())}."
    unsure = [name for name, speed in speeds.items() if speed["min"] <= 1 < speed["median"]]
    if unsure:
        yield f"Not faster in every round, so undecided: {', '.join(unsure)}."


def _fastest(row: Row, base: str) -> Iterator[str]:
    ratio, rounds = row["speed"][base], row["rounds"]
    least = "" if ratio["min"] == ratio["max"] else f" ({ratio['min']:.2f} to {ratio['max']:.2f} in {rounds} rounds)"
    if ratio["median"] > 1:
        yield f"{row['method']} is fastest, {ratio['median']:.2f} times as fast as {base}{least}."
    else:
        yield f"no method is faster than {base}; the best is {row['method']}, {ratio['median']:.2f} times{least}."
    if beats_its_floor(row):
        yield "That is faster than its floor, so it is noise: repeat with more rounds."
    elif rounds == 1:
        yield "One round tells little: repeat with more rounds."


def write_report(path: Path) -> list[Path]:
    """Write tables and plots of a file of results into its folder; return all files."""
    data = read_results(path)
    if data is None:
        raise ElfattError(f"{path} does not exist; give a file of `elfatt-sd bench` or benchmarks/gpu_suite.py.")
    try:
        if "groups" in data:
            return save(data, path)
        table, pictures = path.with_suffix(".md"), draw_parts(data, path)
        write_file(table, describe_suite(data, path, path.parent).encode())
        return [path, table, *pictures]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise _no_results(path, error) from error


def read_results(path: Path) -> dict[str, Any] | None:
    """Return what a file of results holds, None where there is no file."""
    return read_typed(path, dict[str, Any], "`elfatt-sd bench` makes it again")


def draw_parts(suite: Results, path: Path) -> list[Path]:
    """Draw each part of a suite into a folder of the suite's name; return the plots."""
    pictures = []
    for name, part in suite.get("parts", {}).items():
        pictures.append(_part_picture(path, name))
        with atomic_file(pictures[-1]) as file:
            plot(part, name).savefig(file, format="png", dpi=150)
    return pictures


def describe_file(path: Path, start: Path) -> str:
    """Return tables, plots and origin of a file of results, as Markdown for a page in the folder `start`."""
    data = read_results(path) or {}
    try:
        if "parts" in data:
            return describe_suite(data, path, start)
        return describe_part("", data, path, start)
    except (ValueError, KeyError, TypeError) as error:
        raise _no_results(path, error) from error


def _no_results(path: Path, error: Exception) -> ElfattError:
    return ElfattError(f"{path} holds no results of a benchmark ({type(error).__name__}: {error}).")


def describe_suite(suite: Results, path: Path, start: Path) -> str:
    said = [describe_part(name, results, path, start) for name, results in suite["parts"].items()]
    return "\n".join([*said, _concluded(suite)])


def describe_part(name: str, results: Results, path: Path, start: Path) -> str:
    lines = [f"### {name}", ""] if name else []
    lines += [markdown(results)]
    lines += picture_line(results, _part_picture(path, name) if name else path.with_suffix(".png"), start)
    return "\n".join([*lines, origin(results), ""])


def _concluded(suite: Results) -> str:
    lines: list[str] = []
    if goals := suite.get("goals"):
        lines += ["### Goals", "", "| part | method | what | measured | at least | rounds | |", "|---" * 7 + "|"]
        for goal in goals:
            met = verdict(goal["gain"] >= goal["goal"], goal["rounds"])
            figures = f"{goal['gain']:.2f} | {goal['goal']} | {goal['rounds']}"
            lines.append(f"| {goal['part']} | {goal['method']} | {goal['what']} | {figures} | {met} |")
        lines.append("")
    if peaks := suite.get("peaks"):
        lines += ["### Greatest peak of our methods", "", "| part | method | fraction of the untouched call's |"]
        lines += ["|---|---|---|"]
        lines += [f"| {part} | {peak['method']} | {peak['share']:.3f} |" for part, peak in peaks.items()]
        lines.append("")
    if slopes := suite.get("memory_slope"):
        methods = list(dict.fromkeys(method for known in slopes.values() for method in known))
        lines += ["### GB for +1 image", "", f"| method | {' | '.join(slopes)} |", "|---" * (len(slopes) + 1) + "|"]
        for method in methods:
            cells = [f"{known[method]:.3f}" if method in known else "" for known in slopes.values()]
            lines.append(f"| {method} | {' | '.join(cells)} |")
        lines.append("")
    for heading, key in (("Not measured", "errors"), ("Packages that were not there", "missing")):
        if found := suite.get(key):
            listed = (f"- {name}: {' '.join(why.split())}" for name, why in found.items())
            lines += [f"### {heading}", "", *listed, ""]
    return "\n".join(lines)


def verdict(met: bool, rounds: int = FEW_REPEATS) -> str:
    return few_rounds(rounds) or ("met" if met else "**missed**")


def few_rounds(rounds: int) -> str:
    return f"only {rounds} round{'s' * (rounds > 1)}" if rounds < FEW_REPEATS else ""


def picture_line(results: Results, path: Path, start: Path) -> list[str]:
    return [f"![{results['kind']}]({link(path, start)})", ""] if path.exists() else []


def _part_picture(path: Path, name: str) -> Path:
    return place_of(path.with_suffix(""), name.replace(" ", "-"), ".png")


def origin(results: Results) -> str:
    """Say in a sentence or two where figures come from."""
    machine = results["machine"]
    packages = machine["packages"]
    threads = f"{machine['cpu_threads']} thread{'s' * (machine['cpu_threads'] != 1)}"
    versions = [f"{name} {packages[name]}" for name in ("torch", "diffusers")]
    memory = "freed memory kept" if machine.get("keeps_freed_memory") else ""
    said = ", ".join(filter(None, [machine["device"], threads, *versions, _precision(results), memory]))
    rounds = [row["rounds"] for row in results["rows"] if "rounds" in row]
    if rounds:
        span = str(max(rounds)) if len({*rounds}) == 1 else f"{min(rounds)} to {max(rounds)}"
        several = f"medians of {span} interleaved rounds, in brackets the least and greatest ratio"
        said += "; one round" if max(rounds) == 1 else f"; {several}"
    sittings = [sitting for group in results["groups"] for sitting in group["sittings"]]
    shares = [sitting["bystanders"] for sitting in sittings if sitting["bystanders"] is not None]
    if shares:
        said += f"; other processes took at most {max(shares):.0%} of the processors' time"
    commit = short_commit(machine.get("commit"))
    made = f"Made by `{results['command']}`" if results.get("command") else "Made"
    return f"{said}. {made}" + (f" at commit {commit}." if commit else ".")


def _precision(results: Results) -> str:
    of_rows = ", ".join(dict.fromkeys(row["dtype"] for row in results["rows"] if "dtype" in row))
    always = "float32" if results["kind"] in ("host", "orders") else ""
    return str(results["settings"].get("dtype") or of_rows or always)
