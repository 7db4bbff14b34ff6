"""Measure approximations on what the layers of a running pipeline are really given: error, time, effect.

The run stays untouched: a layer's exact output goes on, and the approximations of it are thrown away once measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from elfatt_sd.config import PatchConfig
from elfatt_sd.errors import ElfattError, is_out_of_memory
from elfatt_sd.families import find_denoisers, takes_steps
from elfatt_sd.measure import Stopwatch, timed
from elfatt_sd.methods import Draws, Merge, attentions, is_own
from elfatt_sd.phases import DENSE, EXACT, LayerPhases, Narrower, Phase
from elfatt_sd.runtime.call import Call, LayerCall, image_of
from elfatt_sd.runtime.denoiser import Owner, Patch
from elfatt_sd.runtime.layer import after_forward, choose_layers, device_of, fits
from elfatt_sd.runtime.memory import copies_of
from elfatt_sd.runtime.schedule import Schedule

RATIOS = (0.5, 0.7)  # of tokens that are merged before exact attention
SHARED = (1, 2, 4, 8)  # steps that share a difference to exact attention, or a whole output
SINCE = (0, 1, 3, 7)  # steps since the difference to exact attention was measured; in between, errors are interpolated
ALIGNED = 4  # stretches begin at multiples of it, where differences that steps share are measured
LEAST_PART = 0.03  # of the slowest layer's time; faster layers stay exact
KEPT = 2**16  # values of a difference that are kept, so that memory stays bounded however large the model is
REUSED = -1  # in place of an approximation's number: the output of an earlier step
_FASTER = 0.95  # of the time of something else, from which on a dtype counts as faster
_TIMED = 3  # times that a dtype is timed
_MORE_PRECISE_FIRST: tuple[Narrower, ...] = ("float16", "bfloat16")
_PLACEHOLDER = PatchConfig(
    "probe", residual_limit=10**6, per_layer=(LayerPhases("*", (Phase(1.0, "reuse", residual_steps=2),)),)
)
_Key = tuple[str, tuple[int, ...], int]  # a layer, its network and which of its calls in the step, an approximation


@dataclass(frozen=True)
class Candidate:
    """A phase that a layer can have."""

    phase: Phase  # until the end of the run
    base: int  # number of the approximation among those that are measured; -1 uses the output of an earlier step


EXACTLY = Candidate(EXACT, -2)


def bases(tokens: int, denoisers: Mapping[str, nn.Module], dtype: Narrower | None = None) -> list[Phase]:
    """Return the approximations to measure in a layer, each without sharing between steps."""
    found = [] if dtype is None else [DENSE[dtype]]
    for kind in attentions().values():
        if kind.exact and kind.merges:
            found += [Phase(1.0, kind(), merge=Merge(ratio), attention_dtype=dtype) for ratio in RATIOS]
        elif not kind.exact and not kind.empty:
            dtypes = (dtype,) if is_own(kind) else (dtype, None)  # what somebody else has written may not go with it
            found += [Phase(1.0, one, attention_dtype=each) for one in kind.choices(tokens) for each in dtypes]
    return [phase for phase in dict.fromkeys(found) if fits(PatchConfig("candidate", (phase,)), dict(denoisers))]


def candidates(measured: Sequence[Phase], steps: int, *, share: bool = True, guided: bool = False) -> list[Candidate]:
    """Return all phases that can be chosen, exact attention first."""
    dtype = measured[0].attention_dtype if measured else None
    groups = [count for count in SHARED if count <= steps and (share or count == 1)]
    found = [EXACTLY]
    for count in groups:
        for number, phase in enumerate(measured):
            shared = dataclasses.replace(phase, residual_steps=count)
            if shared.residual_steps < count:  # exact attention has nothing to share
                continue
            found.append(Candidate(shared, number))
            if guided and shared.corrects:
                found.append(Candidate(dataclasses.replace(shared, residual_guidance=True), number))
        if count > 1:
            reused = [kind() for kind in attentions().values() if kind.empty]
            phases = [Phase(1.0, kind, residual_steps=count, attention_dtype=dtype) for kind in reused]
            found += [Candidate(phase, REUSED) for phase in phases]
    return found


class Rows(NamedTuple):
    """What a layer or a denoiser gave, as float32 without shape; or by how much it was off."""

    joined: Tensor  # `(1 - scale) without + scale with`, as guidance joins the rows; all of them where it does not
    given: Tensor | None  # the rows with the prompt; None where nothing is joined

    def __sub__(self, other: Rows) -> Rows:
        given = None if self.given is None or other.given is None else self.given - other.given
        return Rows(self.joined - other.joined, given)

    @property
    def size(self) -> float:
        """Its squared norm."""
        return float(self.joined.square().sum())


def rows_of(output: Any, scale: float | None = None, copies: int = 1) -> Rows:
    """Return what was given under guidance: an error of both rows counts once, that of one by its factor squared.

    Of 2 copies of the same latents, those without the prompt come first, and those with it last. Other numbers, or no
    scale, leave all rows as they are.
    """
    parts = [each.detach().float() for each in tree_leaves(getattr(output, "sample", output)) if each is not None]
    if copies != 2 or scale is None:
        return Rows(torch.cat([part.flatten() for part in parts]), None)
    halves = [part.chunk(2) for part in parts]
    without, given = (torch.cat([half[number].flatten() for half in halves]) for number in (0, 1))
    return Rows(torch.lerp(without, given, scale), given)


@dataclass
class LayerFigures:
    bases: list[Phase]  # the approximations
    lost: set[int] = field(default_factory=set)  # numbers of those that ran out of memory, or gave NaN or infinity
    # numbers of those whose errors in two steps are independent: they draw at random in each step, or round
    fresh: set[int] = field(default_factory=set)
    seconds: list[float] = field(default_factory=list)  # of exact attention, by call
    calls: int = 0  # of the layer in the probed steps
    copies: int = 1  # of the same latents among the rows of its input, where guidance makes one of them; 1 otherwise
    # of each approximation, time by time of exact attention
    ratios: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    # by stretch, approximation, steps since the difference was measured (0 shares none), and whether it was measured in
    # the rows with the prompt alone: the squared relative errors
    errors: dict[tuple[int, int, int, bool], list[float]] = field(default_factory=lambda: defaultdict(list))
    # by stretch, the squared relative change of the denoiser's output by squared relative error of the layer's
    effects: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def to_dict(self) -> dict[str, Any]:
        own = {name: list(value.items()) if isinstance(value, dict) else value for name, value in vars(self).items()}
        bases = [phase.to_dict() for phase in self.bases]
        return {**own, "bases": bases, "lost": sorted(self.lost), "fresh": sorted(self.fresh)}

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> dict[str, Self]:
        """Read what `to_dict` gave, by layer."""
        found = {}
        for layer, own in data.items():
            plain = own["seconds"], own["calls"], own["copies"]
            found[layer] = figures = cls([*map(Phase.from_dict, own["bases"])], {*own["lost"]}, {*own["fresh"]}, *plain)
            for name in ("ratios", "errors", "effects"):
                pairs = ((tuple(key) if isinstance(key, list) else key, values) for key, values in own[name])
                getattr(figures, name).update(pairs)
        return found

    def error(self, stretch: int, base: int, since: int = 0, *, guided: bool = False) -> float:
        """Return the mean squared relative error of an approximation in a stretch."""
        if base in self.lost:
            return math.inf
        if not since and not guided:
            return statistics.fmean(self.errors.get((stretch, base, 0, False)) or [math.inf])
        known = [each for each in SINCE if (each or guided) and (stretch, base, each, guided) in self.errors]
        errors = [statistics.fmean(self.errors[stretch, base, each, guided]) for each in known]
        return float(np.interp(since, known, errors)) if known else math.inf

    def dense(self, phase: Phase) -> int | None:
        """Return the number of exact attention in a phase's narrower dtype; None where there is none."""
        narrower = (number for number, each in enumerate(self.bases) if each.dense)
        return None if phase.attention_dtype is None else next(narrower, None)

    def middle(self, stretch: int) -> int | None:
        errors = {number: self.error(stretch, number) for number in self.ratios}
        usable = sorted((number for number in errors if math.isfinite(errors[number])), key=errors.__getitem__)
        return usable[len(usable) // 2] if usable else None

    def ratio(self, base: int) -> float:
        return 0.0 if base == REUSED else statistics.median(self.ratios[base] or [math.inf])


def slow_layers(figures: Mapping[str, LayerFigures]) -> list[str]:
    seconds = {name: statistics.median(own.seconds) for name, own in figures.items()}
    return [name for name, own in seconds.items() if own > LEAST_PART * max(seconds.values())]


@dataclass(frozen=True)
class Stretch:
    """Steps of the run that are tuned together."""

    first: int  # its first step
    last: int  # its last one

    def __len__(self) -> int:
        return self.last - self.first + 1

    @property
    def probed(self) -> list[int]:
        """Steps since its first one that are measured."""
        return [since for since in SINCE if since < len(self)]

    def groups(self, shared: int) -> list[int]:
        inner = (step for step in range(self.first + 1, self.last + 1) if step % shared == 0)
        return [end - start for start, end in itertools.pairwise([self.first, *inner, self.last + 1])]


class ExactRun:
    """Watches all self-attention layers within a `with` block, while a pipeline runs; the exact output goes on."""

    see_layer: Any = None  # told of a layer's call that is over: its state, what makes it again, and its output
    see_call: Any = None  # likewise, of the denoiser's

    def __init__(self, pipe: Any, denoisers: Mapping[str, nn.Module]) -> None:
        chosen = choose_layers(dict(denoisers), _PLACEHOLDER)
        self._schedule = Schedule(Owner(pipe))
        self._patches = {
            name: Patch(_PLACEHOLDER, chosen[name], denoiser, self._schedule) for name, denoiser in denoisers.items()
        }
        self._undo = contextlib.ExitStack()
        self._busy = False

    @property
    def steps(self) -> int:
        return self._schedule.run.steps

    def __enter__(self) -> ExactRun:
        with contextlib.ExitStack() as undo:
            undo.enter_context(torch.compiler.set_stance("force_eager"))
            for name, patch in self._patches.items():
                patch.install()
                undo.callback(patch.remove)
                patch.watched, patch.pays = True, lambda *_: False  # every layer stays exact
                for layer in patch.layers:
                    after = functools.partial(self._after, layer, "state", self.see_layer)
                    undo.callback(after_forward(layer.layer.attention, after))
                if self.see_call is not None and takes_steps(name):
                    after = functools.partial(self._after, patch, "call", self.see_call)
                    undo.callback(after_forward(patch.module, after))
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def approximate(
        self,
        state: LayerCall,
        again: Callable[[], Any],
        phase: Phase,
        step: int,
        config: PatchConfig = _PLACEHOLDER,
        ahead: Any = None,
    ) -> Any:
        """Return what a layer gives in place of its exact output; nothing is carried over from other layers."""
        states, call = state.call.states, Call(config, step)
        call.given = state.call.given
        states[state.index] = own = LayerCall(state.patched, call, state.grid)
        try:
            own.begin(phase, step, device_of(state.patched.parts, call.given.sample.device), ahead)
            own.block_input = state.block_input
            return again()
        finally:
            states[state.index] = state

    def _after(self, own: Any, now: str, tell: Callable[..., None], again: Callable[[], Any], output: Any) -> None:
        """Tell of a call of a module that is over, but not of those that are made to measure."""
        found = None if self._busy else getattr(own, now)
        if found is not None and (now == "call" or found.grid.tokens):
            self._busy = True
            try:
                tell(found, again, output)
            finally:
                self._busy = False


class Probe(ExactRun):
    """Measures within a `with` block, while the pipeline runs."""

    def __init__(self, pipe: Any, stretches: list[Stretch], *, effects: int = 0, scale: float | None = None) -> None:
        self._denoisers = find_denoisers(pipe)
        super().__init__(pipe, self._denoisers)
        self._stretches = stretches
        self._effects = effects
        self._scale = scale
        self._kept: dict[_Key, Rows] = {}
        self._latest: dict[str, tuple[int, float]] = {}  # by layer, an approximation and its squared error
        self.figures: dict[str, LayerFigures] = {}

    def _place(self, step: int) -> tuple[int, int] | None:
        """Return the stretch of a step that is measured, and the steps since its first one."""
        places = ((number, step - stretch.first) for number, stretch in enumerate(self._stretches))
        return next((place for place in places if place[1] in self._stretches[place[0]].probed), None)

    def see_layer(self, state: LayerCall, again: Callable[[], Any], output: Any) -> None:
        place = self._place(state.call.step)
        if place is None:
            return
        name, turn = state.layer.name, (id(state.patched.patch), state.call.place[0], state.calls)
        self._latest.pop(name, None)
        copies = copies_of(state.call.given.sample)
        exact = rows_of(output, self._scale, copies)
        size = exact.size or 1.0
        if name not in self.figures:
            dtype = self._faster_dtype(state, again, image_of(output, state))
            self.figures[name] = LayerFigures(bases(state.grid.tokens, self._denoisers, dtype))
        figures = self.figures[name]
        figures.calls += 1
        figures.copies = 1 if exact.given is None else copies
        if place[1] == 0 or not figures.seconds:
            figures.seconds.append(timed(again, exact.joined.device))
        self._share(figures, (name, turn, REUSED), place, Rows(exact.joined, None), size)
        for number, phase in enumerate(figures.bases):
            if number in figures.lost:
                continue
            with _loses(figures, number):  # its draws are those of the steps that share, its time has them in it
                draws = _Seen()
                # One turn each, as the run meets the layer: `autotune`, which has no run, times until it is clear.
                with Stopwatch(exact.joined.device) as watch:
                    made = self.approximate(state, again, phase, self._stretches[place[0]].first, ahead=draws)
                figures.ratios[number].append(watch.seconds / figures.seconds[-1])
                figures.fresh.update({number} if draws.fresh or phase.dense else ())
                error = exact - rows_of(made, self._scale, copies)
                squared = error.size / size
                if not math.isfinite(squared):
                    figures.lost.add(number)
                    continue
                figures.errors[place[0], number, 0, False].append(squared)
                self._share(figures, (name, turn, number), place, error, size)
        if (middle := figures.middle(place[0])) is not None:
            self._latest[name] = middle, figures.errors[place[0], middle, 0, False][-1]

    def _faster_dtype(self, state: LayerCall, again: Callable[[], Any], output: Tensor) -> Narrower | None:
        if output.dtype != torch.float32:
            return None
        best, limit = None, _FASTER
        for dtype in _MORE_PRECISE_FIRST:
            rounded = functools.partial(self.approximate, state, again, DENSE[dtype], state.call.step)
            with contextlib.suppress(RuntimeError, TypeError):  # the device cannot, or its memory is full
                if not image_of(rounded(), state).isfinite().all():
                    continue
                pairs = [(timed(again, output.device), timed(rounded, output.device)) for _ in range(_TIMED)]
                ratio = statistics.median(own / before for before, own in pairs)
                if ratio < limit:
                    best, limit = dtype, ratio * _FASTER
        return best

    def _share(self, figures: LayerFigures, key: _Key, place: tuple[int, int], error: Rows, size: float) -> None:
        """Keep the difference in the first step of a stretch, and see in the others what correcting by it leaves."""
        stretch, since = place
        values = error.joined.numel()
        every = max(1, values // KEPT) | 1  # odd, so that all channels have their turn
        part = Rows(error.joined[::every].clone(), None if error.given is None else error.given[::every].clone())
        if since == 0:
            self._kept[key] = part
        known = self._kept.get(key)
        if known is None or known.joined.shape != part.joined.shape:
            return
        if since:
            left = float((part.joined - known.joined).square().mean()) * values / size
            figures.errors[stretch, key[2], since, False].append(left)
        if known.given is not None:
            left = float((part.joined - known.given).square().mean()) * values / size
            figures.errors[stretch, key[2], since, True].append(left)

    def see_call(self, call: Call, again: Callable[[], Any], output: Any) -> None:
        """Measure what an error of each layer does to the denoiser's output."""
        place = self._place(call.step)
        slow, stretches = slow_layers(self.figures), len(self._stretches)
        measured = np.linspace(0, stretches - 1, min(stretches, self._effects // max(1, len(slow))))
        if place is None or place[1] or place[0] not in map(round, measured):
            return
        copies = copies_of(call.given.sample)
        exact = rows_of(output, self._scale, copies)
        for state in call.states.values():
            if state.layer.name not in self._latest or state.layer.name not in slow:
                continue
            number, error = self._latest[state.layer.name]
            figures = self.figures[state.layer.name]
            call.restart()
            with _loses(figures, number):
                state.begin(figures.bases[number], self._stretches[place[0]].first, exact.joined.device)
                effect = (exact - rows_of(again(), self._scale, copies)).size / (exact.size or 1.0)
                if error > 0 and math.isfinite(effect):
                    figures.effects[place[0]].append(effect / error)
            state.begin(EXACT, call.step, exact.joined.device)
        call.restart()


class _Seen:
    """Sees whether an approximation draws at random in each step."""

    fresh = False

    def made(self, draws: Draws, what: str, count: int, make: Callable[[Tensor], Tensor]) -> Tensor:
        self.fresh = self.fresh or draws.shared > 0
        return draws.upload(make(draws.uniform(what, count)))


@contextlib.contextmanager
def _loses(figures: LayerFigures, number: int) -> Iterator[None]:
    """Leave an approximation out that runs out of memory, and somebody's own that fails in a narrower dtype."""
    try:
        yield
    except Exception as error:
        fails = isinstance(error, ElfattError) and figures.bases[number].attention_dtype is not None
        if not fails and not is_out_of_memory(error):
            raise
        figures.lost.add(number)


def stretches_of(steps: int, count: int, begin: int = 0) -> list[Stretch]:
    """Cut a run from a step on in stretches, which begin at multiples of `ALIGNED`; the last step is one of its own.

    In the first and in the last steps the denoiser's output changes most from step to step, and errors of the last one
    change it most.
    """
    last = steps - 1 if count > 1 else begin
    before = ((begin + (last - begin) * number // (count - 1)) // ALIGNED * ALIGNED for number in range(count - 1))
    starts = sorted({*(max(begin, start) for start in before), last})
    return [Stretch(first, end - 1) for first, end in itertools.pairwise([*starts, steps])]
