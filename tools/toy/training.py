"""A resumable training loop: state goes to disk under a temporary name and is then renamed."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from elfatt_sd.files import atomic_file

Loss = Callable[[int, torch.Generator], Tensor]


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stretch of training.

    Attributes:
        name: names the stage's files.
        batch: images a step.
        rate: peak learning rate; it rises over the first 2 % and falls to 0 from `hold` on.
        steps: number of steps, unless `seconds` is given.
        seconds: length in wall-clock time, in place of `steps`; the schedule then follows the clock.
        hold: fraction of the stage after which the rate falls linearly to 0.
        decay: memory of the moving average of the weights, which is the stage's result.
    """

    name: str
    batch: int
    rate: float
    steps: int = 0
    seconds: float = 0.0
    hold: float = 0.3
    decay: float = 0.998

    def progress(self, step: int, elapsed: float) -> float:
        """Finished fraction of the stage."""
        return elapsed / self.seconds if self.seconds else step / self.steps

    def rate_at(self, progress: float) -> float:
        """Learning rate at a finished share."""
        return self.rate * min(1.0, (progress + 1e-3) / 0.02, max(0.0, (1 - progress) / (1 - self.hold)))


def save(state: Any, path: Path) -> None:
    """Write `state` so that `path` is at any time absent, old or complete."""
    with atomic_file(path) as file:
        torch.save(state, file)


def train(
    stage: Stage, model: nn.Module, loss: Loss, folder: Path, seed: int, device: torch.device, save_every: float = 60.0
) -> dict[str, Any]:
    """Run a stage to its end, from where an earlier run stopped; the averaged weights end up in `model`.

    Every step draws from a generator seeded by (seed, stage, step): a resumed run of counted steps equals an unbroken
    one.

    Args:
        stage: what to do.
        model: what to train, already on `device`.
        loss: the loss of a step from (images, generator).
        folder: where the checkpoints are kept.
        seed: the recipe's seed.
        device: where to compute.
        save_every: seconds between checkpoints.

    Returns:
        The record: steps, seconds, and the loss curve as (step, loss) pairs.
    """
    path = folder / f"{stage.name}.pt"
    average = {name: value.detach().clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=stage.rate, betas=(0.9, 0.99), weight_decay=0.01)
    state: dict[str, Any] = {"step": 0, "elapsed": 0.0, "curve": [], "done": False}
    if path.exists():
        saved = torch.load(path, map_location=device, weights_only=True)
        state = saved["state"]
        average = saved["average"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    if not state["done"]:
        _steps(stage, model, loss, optimizer, average, state, path, seed, device, save_every)
    model.load_state_dict(average)
    model.requires_grad_(False).eval()
    return {"steps": state["step"], "seconds": round(state["elapsed"], 1), "curve": state["curve"]}


def _steps(
    stage: Stage,
    model: nn.Module,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    average: dict[str, Tensor],
    state: dict[str, Any],
    path: Path,
    seed: int,
    device: torch.device,
    save_every: float,
) -> None:
    generator = torch.Generator(device)
    model.requires_grad_(True).train()
    began, recent = time.monotonic() - state["elapsed"], []
    saved_at = time.monotonic()
    while (progress := stage.progress(state["step"], state["elapsed"])) < 1:
        for group in optimizer.param_groups:
            group["lr"] = stage.rate_at(progress)
        generator.manual_seed(hash_seed(seed, stage.name, state["step"]))
        value = loss(stage.batch, generator)
        optimizer.zero_grad(set_to_none=True)
        value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        state["step"] += 1
        _follow(average, model, min(stage.decay, state["step"] / (state["step"] + 10)))
        recent.append(value.detach())
        if len(recent) == 20:
            state["curve"].append((state["step"], torch.stack(recent).mean().item()))
            recent.clear()
            if len(state["curve"]) % 10 == 0:
                speed = state["step"] / (time.monotonic() - began)
                print(
                    f"{stage.name}: step {state['step']} ({progress:.0%}), loss {state['curve'][-1][1]:.5f}, "
                    f"{speed:.2f} steps/s",
                    flush=True,
                )
        state["elapsed"] = time.monotonic() - began
        if time.monotonic() - saved_at > save_every:
            _checkpoint(path, model, optimizer, average, state)
            saved_at = time.monotonic()
    state["done"] = True
    _checkpoint(path, model, optimizer, average, state)


def _checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, average: dict[str, Tensor], state: dict[str, Any]
) -> None:
    save({"state": state, "average": average, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


@torch.no_grad()
def _follow(average: dict[str, Tensor], model: nn.Module, decay: float) -> None:
    names = [name for name, value in average.items() if value.is_floating_point()]
    values = model.state_dict()
    torch._foreach_lerp_([average[name] for name in names], [values[name] for name in names], 1 - decay)


def hash_seed(seed: int, name: str, step: int) -> int:
    """A seed for one step, the same in every process."""
    number = seed
    for part in (*name.encode(), step):
        number = (number * 1_000_003 + part + 1) % (2**61 - 1)
    return number


def next_title(name: str, records: Mapping[str, Any]) -> str:
    """Return what the record of a stage is called: a stage that is run again is a further row."""
    times = 1 + sum(title.split()[0] == name for title in records)
    return name if times == 1 else f"{name} ({times})"


def command_line(program: str, description: str, stages: Sequence[str], *, minutes: float) -> argparse.ArgumentParser:
    """Return the options of a recipe, whose stages take so many minutes by default."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoints and results")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--config", choices=("full", "tiny"), default="full")
    parser.add_argument("--minutes", type=float, default=minutes, help="to train with --config full; see full_recipe")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stages", nargs="+", choices=stages, default=stages, help="stages to run, in this order")
    parser.add_argument("--resume-from", type=Path, help="pipeline folder to start from instead of random weights")
    parser.add_argument("--save-every", type=float, default=60.0, help="seconds between checkpoints")
    return parser
