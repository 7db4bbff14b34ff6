"""What a call takes over from earlier steps of its run, extrapolated from those that computed everything."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from elfatt_sd.config import PatchConfig
from elfatt_sd.families import Family
from elfatt_sd.families.cuts import Taking, stand_in
from elfatt_sd.phases import StepReuse, reused_steps
from elfatt_sd.runtime.memory import Memory

Known = tuple[int, dict[str, Tensor]]  # a step, and what was kept in it


class Reuse:
    """The cuts of a patched denoiser."""

    def __init__(self, config: PatchConfig, family: Family, module: Any, whole: bool) -> None:
        self._reuse = config.reuse
        self._whole = whole  # of a ControlNet, whose output is what its denoiser takes over
        self.orders: dict[str, int] = {}  # the highest of each cut
        for each in config.reuse:
            self.orders[self._cut(each)] = max(each.order, self.orders.get(self._cut(each), 0))
        self._parts = {name: family.cut(module, name) for name in self.orders}
        self._undo: list[Callable[[], None]] = []

    def _cut(self, reuse: StepReuse) -> str:
        return "output" if self._whole else reuse.cut

    def install(self, find: Callable[[str], Taking | None]) -> None:
        for name, parts in self._parts.items():
            self._undo += [stand_in(part, functools.partial(find, name)) for part in parts]

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()

    def skipped_in(self, takings: dict[str, Taking]) -> set[int]:
        """Return the modules, by id, that are not run in a call."""
        parts = [part for name, taking in takings.items() if taking.taken is not None for part in self._parts[name]]
        run = {id(each) for part in parts if part.runs is not None for each in part.runs.modules()}
        return {id(each) for part in parts for each in part.module.modules()} - run

    def takings(self, step: int, steps: int, memory: Memory, place: tuple[int, ...]) -> dict[str, Taking]:
        """Return what a call takes over, by the name of its cut; or what it keeps, where a later one may."""
        plan, known = reused_steps(self._reuse, steps), memory.history.setdefault(place, {})
        now = plan[step]
        if now is not None and len(known.get(self._cut(now), ())) > now.order:
            return {self._cut(now): Taking(extrapolated(known[self._cut(now)], now.order, step))}
        return {self._cut(later): Taking() for later in plan[step + 1 :] if later is not None}

    def keep(self, step: int, takings: dict[str, Taking], memory: Memory, place: tuple[int, ...], copied: bool) -> None:
        """Keep what a call that computed everything leaves; of compiled code a copy, as that writes over it."""
        for name, taking in takings.items():
            if taking.taken is None and taking.kept:
                kept = {key: value.clone() for key, value in taking.kept.items()} if copied else taking.kept
                known = memory.history.setdefault(place, {}).get(name, [])
                memory.history[place][name] = [*known[len(known) - self.orders[name] :], (step, kept)]

    def bytes_of(self, takings: dict[str, Taking]) -> int:
        """Bytes of what a call leaves, in all the steps that are kept at the same time."""
        return sum(
            (self.orders[name] + 1) * value.nbytes for name, taking in takings.items() for value in taking.kept.values()
        )


@torch.no_grad()
def extrapolated(known: Sequence[Known], order: int, step: int) -> dict[str, Tensor]:
    """Return the value in a step of the polynomial through the last `order + 1` known ones (Lagrange)."""
    used = known[len(known) - order - 1 :]
    if order == 0:
        return used[0][1]
    nodes = [node for node, _ in used]
    weights = [math.prod((step - other) / (node - other) for other in nodes if other != node) for node in nodes]
    found = {name: value * weights[-1] for name, value in used[-1][1].items()}
    for weight, (_, values) in zip(weights, used[:-1], strict=False):
        for name, value in found.items():
            value.add_(values[name], alpha=weight)
    return found
