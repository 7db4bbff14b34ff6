"""Short trainings, each to a file with the score of every test scene; a stopped run goes on where it was."""

from __future__ import annotations

import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from elfatt_sd.attention.softmax import halves
from elfatt_sd.files import write_json
from elfatt_sd.measure import Progress
from elfatt_sd.nn import ElfattAttention
from tools.toy.training import Stage, hash_seed, train
from tools.vision import scenes
from tools.vision.models import LEVELS, PLAIN, ROWS, Labeller
from tools.vision.scenes import IGNORED, TOKEN, Scenes

TEST_SCENES = 2000
BATCH = 32
WHOLE = 0.3  # weight of the loss of the whole image's class


class OutOfTime(Exception):
    """The minutes are over."""


@dataclasses.dataclass(frozen=True)
class Table:
    """What a table trains and scores."""

    draw: Callable[[int, torch.Generator], Scenes]
    rows: Sequence[str] = tuple(name for name in ROWS if name != "effatt without LePE")
    score: str = "tokens"  # what the score of the tokens is called
    pattern: str = "pattern"  # what the score of the whole image is called
    patterns: int = 4
    seeds: int = 3
    steps: int = 600
    rate: float = 1e-3  # peak learning rate
    shape: Any = None  # of the backbone; None is the plain one
    side: int = 48  # pixels
    classes: int = 2


PARTNERS = Table(scenes.partners, rows=(*ROWS,), score="partners", pattern="cue", patterns=2, steps=900)
TABLES = {
    "partners": PARTNERS,
    "shifted": dataclasses.replace(
        PARTNERS, draw=functools.partial(scenes.partners, shift=2), rows=("softmax", "elfatt", "effatt")
    ),
    "matching": Table(scenes.matching, score="matching", rate=5e-3),  # with 1e-3 hardly a row learns it in this time
    "segments": Table(
        scenes.segments, ("softmax", "elfatt", "effatt", "local"), "mIoU", "", 0, 2, shape=LEVELS, side=96, classes=3
    ),
}


@dataclasses.dataclass(frozen=True)
class Effort:
    """What the trainings of all rows have alike."""

    steps: int | None  # None is what the table has
    scenes: int  # of the test
    device: torch.device
    deadline: float  # moment of `time.monotonic` at which to stop


def file_of(out: Path, table: str, row: str, seed: int) -> Path:
    return out / table / row.replace(" ", "-") / f"seed-{seed}.json"


def runs(tables: Sequence[str], rows: Sequence[str], seeds: int) -> list[tuple[int, str, str]]:
    """Return seed, table and row of each training: first all rows with seed 0, and so on."""
    return [
        (seed, name, row)
        for seed in range(seeds)
        for name in tables
        for row in TABLES[name].rows
        if row in rows and seed < TABLES[name].seeds
    ]


def train_all(out: Path, orders: Sequence[tuple[int, str, str]], effort: Effort, tell: Progress) -> None:
    """Train what has no file yet. `OutOfTime`, as a kill, loses no more than a minute's work."""
    for done, (seed, name, row) in enumerate(orders):
        tell("training", done, len(orders))
        if not file_of(out, name, row, seed).exists():
            write_json(file_of(out, name, row, seed), _trained(out, name, row, seed, effort))
            file_of(out, name, row, seed).with_suffix(".pt").unlink(missing_ok=True)
    tell("training", len(orders), len(orders))


def _trained(out: Path, name: str, row: str, seed: int, effort: Effort) -> dict[str, Any]:
    table, device = TABLES[name], effort.device
    torch.manual_seed(hash_seed(seed, name, 0))  # of all rows; their scenes are the same, too
    model = Labeller(row, table.shape or PLAIN, table.side // TOKEN, table.classes, table.patterns).to(device)

    def loss(count: int, generator: torch.Generator) -> Tensor:
        if time.monotonic() > effort.deadline:
            raise OutOfTime
        drawn = table.draw(count, torch.Generator().manual_seed(generator.initial_seed()))
        tokens, whole = model(drawn.images.to(device))
        value = nn.functional.cross_entropy(tokens, drawn.labels.to(device), ignore_index=IGNORED)
        if whole is not None and drawn.pattern is not None:
            value = value + WHOLE * nn.functional.cross_entropy(whole, drawn.pattern.to(device))
        return value

    path = file_of(out, name, row, seed)
    steps = table.steps if effort.steps is None else effort.steps
    stage = Stage(path.stem, BATCH, table.rate, steps, hold=0.4, decay=0.98)
    print(f"{name}, {row}:", flush=True)
    record = train(stage, model, loss, path.parent, seed, device)
    found = {"table": name, "row": row, "seed": seed, "steps": record["steps"], "seconds": record["seconds"]}
    found |= {"device": str(device), "threads": torch.get_num_threads(), "torch": torch.__version__}
    return found | {
        "scores": scores_of(model, table, effort.scenes, device),
        "heads": head_errors(model, table.draw(100, torch.Generator().manual_seed(hash_seed(0, "heads", 0))).images),
        "loss": [list(pair) for pair in record["curve"]],
    }


@torch.no_grad()
def scores_of(model: Labeller, table: Table, count: int, device: torch.device) -> dict[str, list[float]]:
    """Return the scores of each test scene, which are the same for all rows and seeds."""
    generator, scores = torch.Generator().manual_seed(hash_seed(0, "test", 0)), dict[str, list[float]]()
    for first in range(0, count, 100):
        drawn = table.draw(min(100, count - first), generator)
        tokens, whole = model(drawn.images.to(device))
        own = {table.score: (overlap if table.classes > 2 else accuracy)(tokens.argmax(1).cpu(), drawn)}
        if whole is not None and drawn.pattern is not None:
            own[table.pattern] = (whole.argmax(1).cpu() == drawn.pattern).double()
        for name, values in own.items():
            scores.setdefault(name, []).extend(round(value, 4) for value in values.tolist())
    return scores


@torch.no_grad()
def head_errors(model: Labeller, images: Tensor) -> dict[str, list[float]]:
    """Return how far the heads of each half are from exact attention of their queries, keys and values, by layer.

    The norm of the difference is divided by that of what exact attention returns.
    """
    errors = dict[str, list[float]]()

    def compare(module: Any, given: tuple[Tensor, ...], _: Tensor) -> None:
        own, exact = copy.copy(module), copy.copy(module)
        for each in (own, exact):  # what heads return, before LePE and the projection
            each._modules = {**module._modules, "lepe": None, "proj": nn.Identity(), "norm": nn.Identity()}
        heads, size = module.num_heads, module.proj.in_features // module.num_heads
        exact.block_size, (exact.split_dim, exact.split_sizes) = None, halves(heads, size, 0.0)
        mixed = [each.forward(given[0]).unflatten(-1, (heads, size)) for each in (own, exact)]
        for half, count in zip(("global", "local"), module.split_sizes, strict=True):
            one, two = (each[..., :count, :] if half == "global" else each[..., heads - count :, :] for each in mixed)
            if count:
                errors.setdefault(half, []).append(round(float((one - two).norm() / two.norm()), 4))

    layers = [each for each in model.modules() if isinstance(each, ElfattAttention)]
    hooks = [each.register_forward_hook(compare) for each in layers]
    model(images.to(next(model.parameters()).device))
    for hook in hooks:
        hook.remove()
    return errors


def accuracy(found: Tensor, drawn: Scenes) -> Tensor:
    """Fraction of the scored tokens that are right, `[n]`."""
    return ((found == drawn.labels) & drawn.scored).sum(1) / drawn.scored.sum(1)


def overlap(found: Tensor, drawn: Scenes) -> Tensor:
    """Intersection over union `[n]`, averaged over the classes that are there or were found."""
    kinds = torch.arange(int(drawn.labels.max()) + 1)[:, None, None]
    both, either = ((found == kinds) & (drawn.labels == kinds)), ((found == kinds) | (drawn.labels == kinds))
    there = either.any(2)
    return (both.sum(2) / either.sum(2).clamp_min(1) * there).sum(0) / there.sum(0)
