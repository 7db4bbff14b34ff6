"""What the rows of a run are judged by, and where the judges disagree."""

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
    """A figure with verdicts.

    Attributes:
        name: what sentences call it.
        key: its name in the results.
        of: `distances`, `accuracy` or `metrics`.
    """

    name: str
    key: str
    of: str

    def verdict(self, row: Row) -> str | None:
        """Return the verdict on a row, None where there is none."""
        return row.verdict(self.key, self.of)

    def tells(self, row: Row) -> str | None:
        """Return the verdict on a row if the classes were enough for one."""
        return None if (said := self.verdict(row)) == TOO_FEW else said


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
    """Return the verdict of the headline's judge."""
    return next((judge.verdict(row) for judge in judges(results)), None)


def judged_worse(results: Results, row: Row) -> bool:
    """Tell whether any judge calls a row worse: a gain in one figure does not make up for a loss in another."""
    return any(judge.tells(row) == WORSE for judge in judges(results))


def said_of(results: Results, row: Row) -> str:
    """Write all verdicts: `better in FID and KID`, or `not shown to be worse in FID, but worse in accuracy`."""
    groups: dict[str, list[str]] = {}
    for judge in judges(results):
        if said := judge.tells(row):
            groups.setdefault(_WORDS.get(said, "not shown to be worse"), []).append(judge.name)
    *parts, last = [f"{word} in {_listed(word, names)}" for word, names in groups.items()]
    return ", ".join([*parts, f"{'but' if 'worse' in groups else 'and'} {last}"]) if parts else last


def _listed(word: str, names: Sequence[str]) -> str:
    if word == "worse" or len(names) <= _NAMED:
        return join_names(names)
    return join_names([*names[: _NAMED - 1], plural(len(names) - _NAMED + 1, "other figure")])


def disagreements(results: Results) -> list[tuple[Judge, Judge, list[Row]]]:
    """Return the headline's judge, each other one, and the methods on which the two say different things."""
    known = judges(results)
    pairs = [(known[0], other, _divided(results, known[0], other)) for other in known[1:]]
    return [pair for pair in pairs if pair[2]]


def _divided(results: Results, one: Judge, other: Judge) -> list[Row]:
    """Return the methods on which two judges differ; accuracy or a metric that shows nothing does not."""
    said = [(row, one.tells(row), other.tells(row)) for row in results.methods]
    divided = [(row, second) for row, first, second in said if first and second and first != second]
    return [row for row, second in divided if other.of == one.of or second in _WORDS]
