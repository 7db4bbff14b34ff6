"""What a benchmark gives: raw rounds and the rows from them; as Markdown, on a terminal, as plots."""

from __future__ import annotations

import functools
import itertools
import math
import re
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from elfatt_sd.benchmarking import variants
from elfatt_sd.devices import Bystanders, describe_machine
from elfatt_sd.errors import ElfattError, is_out_of_memory, need
from elfatt_sd.files import atomic_file, place_of, read_typed, write_file, write_json
from elfatt_sd.measure import Call, Comparison, Progress, Spread, Turn, now, ratios, timed
from elfatt_sd.methods import Softmax
from elfatt_sd.peers import PEERS

if TYPE_CHECKING:  # the suite for GPUs runs on machines without it
    from rich.console import Console

Results = dict[str, Any]
Times = Mapping[str, Sequence[float]]
QUICK = 1.0  # seconds of a call on a GPU below which several calls are timed together
Row = Mapping[str, Any]
KEYS = ("size", "tokens", "batch", "dtype", "part")
# How results of other scripts are shown, by kind: their Markdown, and their figure; see benchmarks/shown.py.
OTHERS: dict[str, tuple[Callable[[Results], str], Callable[[Results], Any]]] = {}
_OTHER_PEERS = [name for name in PEERS if name != variants.PEER]
_LEGEND = {  # by the names that it explains
    variants.UNPATCHED: "`untouched` is the model with PyTorch's fused attention",
    Softmax.name: f"`{Softmax.name}` is PyTorch's fused attention",
    "tomesd.*": "`tomesd` is the package",
    **{f"{name}(:.*)?": f"`{name}` is that of {PEERS[name].package or 'diffusers'}" for name in _OTHER_PEERS},
    variants.FLOOR: "`floor` leaves out the self-attention layers of the finest level",
    "exact, .*": "`exact, BACKEND` attends exactly in every self-attention layer, through that backend",
    "floor of .*": "`floor of N levels` leaves out those of the N finest levels",
    "floor: .*": "`floor: similarities` is the product that finds the most similar tokens, and nothing else",
    r"[\w-]+:.*=.*": "`METHOD:SETTING=VALUE` is a method with a setting changed; `ratio=0` merges nothing",
    f".*{variants.COMPILED}": "`compiled` rows ran through `torch.compile`",
    f".*{variants.AUTOTUNED}": "`autotuned` rows patch the layers that the method makes faster, as measured before",
    f".*{variants.KEPT}": "`freed memory kept` rows ran in processes that called `elfatt_sd.keep_freed_memory`",
    "block, .*": "`block, ORDER` attends inside blocks of that order",
    "cell_spread": "`cell_spread` attends to the own cell and to a spread sample",
    "sampled": "`sampled` attends to sampled keys",
    "agents": "`agents` attends through 64 pooled queries, and `elfatt` halves the heads between them and blocks",
    ".* on tome .*": "`on tome 0.5` merges half of the tokens before",
}


@dataclass
class Session:
    """One invocation of a benchmark: what it writes and tells, and at any time the rows of what is measured so far."""

    out: Path | None = None  # folder of the files of results; None writes nothing
    name: str | None = None  # of these files, if not that of the benchmark
    command: str = ""  # the words that were typed, which the results have
    # called with a group's name, and the numbers of its calls that are done and that it has
    progress: Progress = lambda name, done, total: None
    results: Results = field(default_factory=dict)  # empty until it begins

    def begin(self, kind: str, device: torch.device, settings: Mapping[str, Any], **details: Any) -> Self:
        self._device = device
        self.results = {"kind": kind, "command": self.command, "settings": dict(settings)}
        self.results |= {"machine": describe_machine(device), **details, "groups": [], "rows": []}
        return self

    def write(self) -> list[Path]:
        """Write JSON, a Markdown table and a plot, where there is a folder for them; return their paths."""
        if self.out is None:
            return []
        path = self.out / f"{self.name or self.results['kind']}.json"
        write_json(path, self.results)
        return [path, *save(self.results, path)]

    def time(
        self,
        key: Mapping[str, Any],
        calls: Mapping[str, Call],
        repeats: int,
        *,
        seconds: float = math.inf,
        warm_up: Mapping[str, Call] | None = None,
    ) -> None:
        """Time calls interleaved, and keep each whole round; they are warmed up, or what is given does so for them."""
        group, bystanders, started = self.group(key), Bystanders(), now()
        warm, repeated = warm_up or calls, dict[str, int]()

        def take(turn: Turn) -> float:
            return timed(calls[turn.name], self._device, repeated.get(turn.name, 1))

        def warm_one(turn: Turn) -> float:
            taken = timed(warm[turn.name], self._device)
            # the first call may compile
            if self._device.type != "cpu" and (again := timed(warm[turn.name], self._device)) < QUICK:
                repeated[turn.name] = max(1, min(20, round(0.1 / again)))
            return taken

        tell = functools.partial(self.progress, title(key))
        compared = Comparison([*calls], take, repeats, tell, functools.partial(self.lose, key), group["times"])
        tell(0, (repeats + 1) * len(calls))
        try:
            compared.warm_up(warm_one)
            compared.run(seconds)
        finally:  # also when it is stopped
            rounds = min((len(compared.times[name]) for name in compared.names), default=0)
            for name in compared.names:
                del compared.times[name][rounds:]  # of a round that was not finished
            if rounds:
                group["sittings"] = [{"started": started, "rounds": rounds, "bystanders": bystanders.share()}]
            self.work_out()

    def lose(self, key: Mapping[str, Any], variant: str, error: Exception) -> None:
        """Leave a variant out that does not fit into memory."""
        if not is_out_of_memory(error):
            raise error
        self.group(key)["lost"].append(variant)

    def keep_peak(self, key: Mapping[str, Any], variant: str, batch: int, measure: Callable[[], int | None]) -> None:
        """Measure the peak memory of a variant, unless the variant did not fit into memory."""
        group, what = self.group(key), f"{variant}, memory at batch {batch}"
        if variant in group["lost"] or variant in group.get("failed", ()):
            return
        self.progress(f"{title(key)}, {what}", 0, 1)
        peaks = group["peaks"].setdefault(variant, {})
        peaks[str(batch)] = None
        try:
            peaks[str(batch)] = measure()
        except Exception as error:
            self.lose(key, what, error)
        self.work_out()

    def group(self, key: Mapping[str, Any]) -> dict[str, Any]:
        found = next((group for group in self.results["groups"] if group["key"] == dict(key)), None)
        if found is None:
            found = {"key": dict(key), "times": {}, "peaks": {}, "lost": [], "sittings": []}
            self.results["groups"].append(found)
        return found

    def work_out(self) -> None:
        self.results["rows"] = make_rows(self.results)


def make_rows(results: Results) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for group in results["groups"]:
        rows += group.get("measured", ())
        known = {name: times for name, times in group["times"].items() if times}
        runs = results.get("runs") or {name: {"parts": [[name, 1]], "floor": None} for name in known}
        runs = {method: run for method, run in runs.items() if all(name in known for name, _ in run["parts"])}
        totals: dict[str, list[float]] = {}
        for method, run in runs.items():  # round by round, the parts of a run added up, as the mean of its steps
            steps = sum(count for _, count in run["parts"])
            turns = range(min(len(known[name]) for name, _ in run["parts"]))
            totals[method] = [sum(known[name][turn] * count for name, count in run["parts"]) / steps for turn in turns]
        for method, run in runs.items():
            bases = [base for base in results["bases"] if base in totals]
            names = [name for name, _ in run["parts"]]
            row = {**group["key"], "method": method, **_timing(totals[method], totals, bases, run["floor"])}
            # The greatest peak of the parts at the timed batch, and its growth for two rows: an image with guidance.
            peaks = [group["peaks"].get(name, {}) for name in names]
            known_at = [{int(batch): peak for batch, peak in each.items() if peak is not None} for each in peaks]
            batches = sorted(set.intersection(*map(set, known_at)))
            greatest = {batch: max(each[batch] for each in known_at) for batch in batches}
            growth = None
            if len(batches) > 1:
                growth = 2 * (greatest[batches[-1]] - greatest[batches[0]]) / (batches[-1] - batches[0])
            row |= {"peak_bytes": greatest.get(group["key"].get("batch")), "bytes_per_picture": growth}
            if len(names) > 1 or names[0] != method:
                row["parts"] = [
                    {"variant": name, "steps": steps, "what": results["settings"]["variants"][name]["what"]}
                    | _timing(known[name], totals, bases, run["floor"])
                    for name, steps in run["parts"]
                ]
            rows.append(row)
    return rows


def own_part(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    parts, prefix = row.get("parts", ()), f"{variants.plain_name(row['method'])}/"
    own = [part for part in parts if part["variant"].startswith(prefix)]
    return min(own, key=lambda part: part["seconds"], default=None) if len(parts) > 1 else None


def _timing(own: Sequence[float], totals: Times, bases: Sequence[str], floor: str | None) -> dict[str, Any]:
    def ratio(base: Sequence[float], other: Sequence[float]) -> dict[str, float]:
        return Spread.over(ratios(base, other))._asdict()

    return {
        "seconds": statistics.median(own),
        "rounds": len(own),
        "speed": {base: ratio(totals[base], own) for base in bases},
        "floor": {"name": floor, **ratio(own, totals[floor])} if floor is not None and floor in totals else None,
    }


def title(key: Mapping[str, Any]) -> str:
    words = {"size": "{0} pixels", "batch": "batch {0}", "tokens": "{0} tokens"}
    return ", ".join(words.get(name, "{0}").format(value) for name, value in key.items())


# For people.


def markdown(results: Results) -> str:
    """Return the rows as a Markdown table, with what all of them share above it and what their names mean below it."""
    if results["kind"] in OTHERS:
        return OTHERS[results["kind"]][0](results)
    return speed_table(results)


def speed_table(results: Results) -> str:
    rows = results["rows"]
    lines: list[str] = []
    if rows:
        values = {key: {row.get(key) for row in rows} for key in KEYS}
        keys = [key for key in KEYS if len(values[key]) > 1]
        shared = title({key: rows[0][key] for key in KEYS if len(values[key]) == 1 and key in rows[0]})
        cells = _cells(rows, keys, results["bases"], "&nbsp; ")
        lines = [*[f"{shared[:1].upper()}{shared[1:]}:", ""] * bool(shared), *table_lines(cells)]
    return with_notes(lines, results)


def _notes(results: Results) -> list[str]:
    """Say what names mean, what is noise, what did not fit into memory, and what failed otherwise."""
    rows = [row for row in results["rows"] if "speed" in row]
    names = {row["method"] for row in rows}
    known = [text for pattern, text in _LEGEND.items() if any(re.fullmatch(pattern, name) for name in names)]
    said = ["; ".join(known) + "." * bool(known)]
    floors = [(row["method"], each.get("floor")) for row in rows for each in (row, *row.get("parts", ()))]
    noisy = [method for method, floor in floors if floor and round(floor["median"], 3) < 1]
    if noisy:
        named = ", ".join(f"`{name}`" for name in dict.fromkeys(noisy))
        said.append(f"Faster than its floor, which is noise (repeat with more rounds): {named}.")
    for part, powers in results.get("growth", {}).items():
        listed = ", ".join(f"`{name}` {power:.2f}" for name, power in powers.items())
        said.append(f"Time grows with the tokens to the power of, {part}: {listed}.")
    for group in results["groups"]:
        where = title(group["key"])
        if group.get("lost"):
            said.append(f"Did not fit into memory ({where}): {', '.join(group['lost'])}.")
        said += [f"Failed ({where}): {name}: {why}" for name, why in group.get("failed", {}).items()]
    return list(filter(None, said))


def with_notes(lines: Sequence[str], results: Results) -> str:
    return "".join(f"{line}\n" for line in [*lines, *(each for note in _notes(results) for each in ("", note))])


def table_lines(cells: Sequence[Sequence[str]]) -> list[str]:
    head, *others = (f"| {' | '.join(row)} |" for row in cells)
    return [head, "|" + "---|" * len(cells[0]), *others]


def _cells(
    rows: Sequence[Row], keys: Sequence[str], bases: Sequence[str], indent: str, *, brief: bool = False
) -> list[list[str]]:
    """Return a head, and a line for each row and each part of its run, without the columns that have no value."""
    head = [*keys, "method", "time", *(f"times as fast as {base}" for base in bases)]
    head, lines = [*head, "of its floor's time", "peak MiB", "GB for +2 rows"], list[list[str]]()
    for row in rows:
        parts = [] if brief and len(row.get("parts", ())) == 1 else row.get("parts", ())
        for part in (row, *parts):
            name = row["method"] if part is row else f"{indent}{part['steps']} steps: {part['what']}"
            exact = part is not row and variants.plain_name(part["variant"]) == variants.UNPATCHED
            floor = None if exact else part.get("floor")
            line = [*(str(row.get(key, "")) for key in keys), name, clock(part["seconds"])]
            line += [spread(part["speed"].get(base)) for base in bases]
            line += [scaled(floor["median"], 1, 2) if brief and floor else spread(floor, 3)]
            line += [scaled(part.get("peak_bytes"), 2**20, 0)]
            lines.append([*line, "" if brief else scaled(part.get("bytes_per_picture"), 1e9, 3)])
    used = [any(column) for column in zip(*lines, strict=True)]
    return [[*itertools.compress(line, used)] for line in (head, *lines)]


def groups(results: Results) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in results["rows"]:
        found.setdefault(title({key: row[key] for key in KEYS if key in row}), []).append(row)
    return found


def clock(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds * 1e3:.4g} ms"


def spread(ratio: Row | None, digits: int = 2) -> str:
    return "" if ratio is None else Spread(*(ratio[name] for name in Spread._fields)).words(digits)


def scaled(value: float | None, unit: float, digits: int) -> str:
    return "" if value is None else f"{value / unit:.{digits}f}"


def show(results: Results, console: Console) -> None:
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    for name, rows in groups(results).items():
        bases = [base for base in results["bases"] if any(base in row["speed"] for row in rows)][:1]
        head, *lines = _cells(rows, (), bases, "  ", brief=True)
        table = Table(title=name, title_justify="left", box=SIMPLE)
        table.add_column(head[0], overflow="fold")
        for each in head[1:]:
            table.add_column(textwrap.fill(each, 14), justify="right", no_wrap=True)
        for line in lines:
            table.add_row(*map(Text, line), style="dim" if line[0].startswith(" ") else "")
        console.print(table)
    for note in _notes(results):
        console.print(Text(note.replace("`", "")))


def save(results: Results, path: Path, name: str = "") -> list[Path]:
    """Write a Markdown table and a plot next to the JSON file of results; return their paths."""
    table = path.with_suffix(".md")
    write_file(table, markdown(results).encode())
    return [table, *draw(results, path, name)]


def draw(results: Results, path: Path, name: str = "") -> list[Path]:
    """Write the plot alone: what a script draws of its own kind, otherwise bars of the speed."""
    need("a plot", "matplotlib")
    kind, picture = results["kind"], path.with_suffix(".png")
    figure = OTHERS[kind][1](results) if kind in OTHERS else _speed_figure(results)
    if not figure.get_suptitle():
        what = name or results["settings"].get("model") or kind.replace("_", " ")
        about = filter(None, [what, results["settings"].get("dtype"), results["machine"]["device"]])
        figure.suptitle(", ".join(about), fontsize=10)
    with atomic_file(picture) as file:
        figure.savefig(file, format="png", dpi=150)
    return [picture]


def _speed_figure(results: Results) -> Any:
    from matplotlib.figure import Figure

    rows, panels = results["rows"], groups(results)
    columns = min(2, len(panels))
    height = 0.8 + 0.42 * max(len(panel) for panel in panels.values())
    figure = Figure(figsize=(6.5 * columns, height * math.ceil(len(panels) / columns) + 0.8), layout="constrained")
    grid = figure.subplots(math.ceil(len(panels) / columns), columns, squeeze=False).flatten()
    for axes, (name, panel) in zip(grid, panels.items(), strict=False):
        _draw_speeds(axes, panel, name, results["bases"][0])
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    several = max(row["rounds"] for row in rows) > 1
    caption = "Bars: median over the rounds; whiskers: least and greatest round." if several else "One round."
    caption += "\nGrey: to compare with; blue: " + ("other kernels" if results["kind"] == "kernels" else "ours")
    phases = ", mean over a run; orange: one call in its own phase, the fastest of several" * any(map(own_part, rows))
    figure.supxlabel(f"{caption}{phases}.", fontsize=8)
    return figure


def _draw_speeds(axes: Any, rows: Sequence[Row], name: str, base: str) -> None:
    """Draw a bar for each method's run, and a thinner one for its own phase where the run has several."""
    greatest = 1.0
    for place, row in enumerate(rows):
        part, peer = own_part(row), row["method"] == base or variants.is_reference(row["method"])
        if base not in row["speed"]:  # it did not fit into memory
            axes.annotate(f"no {base} to compare with", (0, place), va="center", fontsize=8)
            continue
        bars = [(row["speed"][base], place - 0.15 * (part is not None), 0.5, "0.75" if peer else "tab:blue")]
        bars += [] if part is None else [(part["speed"][base], place + 0.25, 0.25, "tab:orange")]
        for speed, where, width, colour in bars:
            around = [[speed["median"] - speed["min"]], [speed["max"] - speed["median"]]]
            axes.barh(where, speed["median"], width, xerr=around, color=colour, error_kw={"linewidth": 1})
            text = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
            axes.annotate(f"{speed['median']:.2f}", (speed["max"], where), **text)
            greatest = max(greatest, speed["max"])
    axes.axvline(1, color="0.4", linewidth=0.8, zorder=0)
    axes.set(title=name, xlabel=f"times as fast as {base}", xlim=(0, 1.18 * greatest))
    axes.set_yticks(range(len(rows)), [row["method"] for row in rows])
    axes.invert_yaxis()


def write_report(path: Path) -> list[Path]:
    """Write tables and plots of a file of results next to it, of a suite's parts into a folder; return all files."""
    data = read_results(path) or {}
    try:
        parts = {"": data} if "groups" in data else data["parts"]
        return [path, *(file for name, part in parts.items() for file in save(part, part_file(path, name), name))]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise no_results(path) from error


def read_results(path: Path) -> dict[str, Any] | None:
    return read_typed(path, dict[str, Any], "`elfatt-sd bench` makes it again")


def no_results(path: Path) -> ElfattError:
    return ElfattError(f"{path} holds no results; give a file of `elfatt-sd bench` or benchmarks/gpu_suite.py.")


def part_file(path: Path, name: str) -> Path:
    return place_of(path.with_suffix(""), name.replace(" ", "-"), ".json") if name else path
