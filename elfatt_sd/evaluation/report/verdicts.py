"""What the rows of a run are judged by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elfatt_sd.evaluation.intervals import BETTER, TOO_FEW, WORSE
from elfatt_sd.evaluation.report.data import Results
from elfatt_sd.evaluation.report.metrics import metric_names
from elfatt_sd.evaluation.report.rows import Row
from elfatt_sd.evaluation.report.text import join_names, plural

_WORDS = {BETTER: "better", WORSE: "worse"}
_NAMED = 4  # judges that a sentence names where they see nothing bad; more are counted


@dataclass(frozen=True)
class Judge:
    """A figure with verdicts."""

    name: str  # what sentences call it
    key: str  # its name in the results
    of: str  # `distances`, `accuracy` or `metrics`

    def verdict(self, row: Row) -> str | None:
        return row.verdict(self.key, self.of)


def judges(results: Results) -> list[Judge]:
    """Return all figures with verdicts, that of the headline first.

    The distance of the main table comes before the others, then accuracy, then metrics in their order.
    """
    distances = sorted(results.distances, key=lambda name: name != results.distance)
    found = [Judge(name, name, "distances") for name in distances]
    found += [Judge("accuracy", "mean", "accuracy")] if "mean" in results.attributes else []
    found += [Judge(name, name, "metrics") for name in metric_names(results)]
    return [judge for judge in found if any(judge.verdict(row) for row in results.rows)]


def first_verdict(results: Results, row: Row) -> str | None:
    return next((judge.verdict(row) for judge in judges(results)), None)


def judged_worse(results: Results, row: Row) -> bool:
    return any(judge.verdict(row) == WORSE for judge in judges(results))


def said_of(results: Results, row: Row) -> str:
    """Write all verdicts: `, better in FID and KID`, or `, not shown to be worse in FID, but worse in accuracy`."""
    groups: dict[str, list[str]] = {}
    for judge in judges(results):
        if (said := judge.verdict(row)) not in (None, TOO_FEW):
            groups.setdefault(_WORDS.get(said or "", "not shown to be worse"), []).append(judge.name)
    *parts, last = [f"{word} in {_listed(word, names)}" for word, names in groups.items()] or [""]
    joined = ", ".join([*parts, f"{'but' if 'worse' in groups else 'and'} {last}"]) if parts else last
    return joined and f", {joined}"


def _listed(word: str, names: Sequence[str]) -> str:
    if word == "worse" or len(names) <= _NAMED:
        return join_names(names)
    return join_names([*names[: _NAMED - 1], plural(len(names) - _NAMED + 1, "other figure")])
