"""Two rows compared, image by image: sharper than the intervals of the two means."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.records import Estimate
from elfatt_sd.evaluation.report.data import Results, Row
from elfatt_sd.evaluation.report.tables import decimals_for, fixed, interval, md_table
from elfatt_sd.evaluation.statistics import ClassEstimate
from elfatt_sd.measure import Spread, ratios

_MEASURES = {"psnr": "PSNR, dB", "ssim": "SSIM"}
_SAME = ("model", "scheduler", "guidance", "height", "width", "steps", "dtype", "seed")  # what runs must have in common
_TITLES = ["Row", "Against", *_MEASURES.values(), "Closer by PSNR"]


def compare_rows(results: Results, cells: Sequence[str], others: Sequence[Results] = ()) -> str:
    """Compare rows of a run by how close each of their images is to the untouched pipeline's of the same latent.

    Args:
        results: of a run.
        cells: names of rows, each followed by that of the one it is compared with; `RUN/ROW` for one of another run.
        others: the other runs, with the same prompts and latents.

    Returns:
        A Markdown table: for each pair the mean difference in PSNR and SSIM with its 95 % interval, in how many images
        the first row is the closer one, and how many times as fast its denoiser is: the median over rounds, with the
        least and greatest. That is left out where a row was not timed, or in another run. A difference in PSNR needs
        two images that are not the untouched one (a dash where there are none); one that is the untouched one is
        closer than any other.

    Raises:
        ElfattError: an odd number of rows, one that is not there, one without the figures of each image, or runs
            whose images are not of the same prompts or the same pipeline.
    """
    check_alike([results, *others])
    rows = {row.cell: (row, row.name) for row in results.rows}
    rows |= {f"{run.name}/{row.cell}": (row, f"{row.name} ({run.name})") for run in others for row in run.rows}
    if len(cells) % 2 or not cells or not rows.keys() >= {*cells}:
        raise ElfattError(f"rows={list(cells)!r} of {results.name} cannot be paired; there are: {', '.join(rows)}.")
    pairs = [(rows[one], rows[other]) for one, other in zip(cells[::2], cells[1::2], strict=True)]
    means = [
        {measure: _mean(one, _differences(one, other, measure)) for measure in _MEASURES}
        for (one, _), (other, _) in pairs
    ]
    timed = all(row.timed["unet"].values for pair in pairs for row, _ in pair) and "/" not in "".join(cells)
    decimals = {measure: decimals_for(each[measure] for each in means) for measure in _MEASURES}
    lines = []
    for ((one, name), (other, against)), each in zip(pairs, means, strict=True):
        none = "identical" if {*one.changes["psnr"].pictures, *other.changes["psnr"].pictures} == {None} else "—"
        figures = [none if mean is None else _text(mean, decimals[measure]) for measure, mean in each.items()]
        speed = [_times_as_fast(one, other)] if timed else []
        lines.append([name, against, *figures, _closer(one, other), *speed])
    titles = [*_TITLES, *["Times as fast"] * timed]
    return md_table(titles, lines, [place > 1 for place in range(len(titles))])


def _times_as_fast(one: Row, other: Row) -> str:
    return Spread.over(ratios(other.timed["unet"].values, one.timed["unet"].values)).words()


def _differences(one: Row, other: Row, measure: str) -> list[float | None]:
    """Return the difference in each image; None where one of the two equals the untouched one."""
    sides = [row.changes[measure].pictures for row in (one, other)]
    if not all(sides):
        raise ElfattError(f"rows {one.name!r} and {other.name!r} have no figures of each image; score the run again.")
    if len(sides[0]) != len(sides[1]) or one.paired.classes != other.paired.classes:
        raise ElfattError(f"rows {one.name!r} and {other.name!r} are not of the same prompts.")
    return [None if a is None or b is None else a - b for a, b in zip(*sides, strict=True)]


def _closer(one: Row, other: Row) -> str:
    """Say in how many images the first row is closer; an untouched image has no PSNR, that is, an infinite one."""
    sides = (row.changes["psnr"].pictures for row in (one, other))
    ours, theirs = ([math.inf if value is None else value for value in side] for side in sides)
    return f"{sum(a > b for a, b in zip(ours, theirs, strict=True))} of {len(ours)}"


def _mean(row: Row, differences: Sequence[float | None]) -> Estimate | None:
    kept = [place for place, value in enumerate(differences) if value is not None]
    if not kept:
        return None
    values = torch.tensor([differences[place] for place in kept], dtype=torch.float64)
    mean = ClassEstimate.mean(values, [row.paired.classes[place] for place in kept])
    return Estimate(mean.value, mean.interval())


def _text(mean: Estimate, decimals: int) -> str:
    return f"{fixed(mean.value, decimals, sign=True)} {interval(mean, decimals, sign=True)}".strip()


def check_alike(runs: Sequence[Results]) -> None:
    """Check that rows of several runs can be compared.

    Raises:
        ElfattError: the runs are of different pipelines, sizes, steps or seeds.
    """
    for key in _SAME:
        values = {run.name: run.protocol.get(key) for run in runs}
        if len({str(value) for value in values.values()}) > 1:
            said = ", ".join(f"{name} {value}" for name, value in values.items())
            raise ElfattError(f"runs with different {key} have nothing in common: {said}.")
