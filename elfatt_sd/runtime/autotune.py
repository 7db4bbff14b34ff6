"""Decide by measurement which layers a method makes faster on this device; the others are left alone.

A layer is timed with random tokens of the shape it really gets, the approximation and the untouched attention in turn.
Decisions are kept in a file, by device, versions, shape, exact attention and phase. Where it cannot be decided, a layer
is left alone.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

import elfatt_sd
from elfatt_sd.config import PatchConfig
from elfatt_sd.devices import device_name, standard_normal
from elfatt_sd.errors import is_out_of_memory
from elfatt_sd.families import SelfAttention, family_of, unwrap
from elfatt_sd.files import cache_folder, sha256_of_data, write_json
from elfatt_sd.measure import timed
from elfatt_sd.methods import Grid
from elfatt_sd.phases import EXACT, Phase
from elfatt_sd.runtime.call import Call, LayerCall
from elfatt_sd.runtime.joint_processor import attention_alone
from elfatt_sd.runtime.layer import PatchedLayer, device_of, modules_around
from elfatt_sd.runtime.memory import AT_ONCE
from elfatt_sd.runtime.processor import approximate

ROUNDS, MOST_ROUNDS, WARM_UP = 7, 21, 2
_IN_A_ROW = 10
CLEAR = 3, 1.25  # so many rounds do where each of them differs by this factor, to the same side


@dataclasses.dataclass(frozen=True)
class Decision:
    # median over the rounds of time with the approximation by time untouched; nan where nothing was measured
    ratio: float = math.nan
    low: float = math.nan  # lower bound of the median, with about 95 % confidence
    high: float = math.nan  # upper bound
    obstacle: str = ""  # why nothing was measured; empty where something was

    @property
    def settled(self) -> bool:
        return self.high <= 1 or self.low >= 1

    @property
    def pays(self) -> bool:
        return self.high <= 1 and self.ratio < 1

    def __str__(self) -> str:
        if self.obstacle:
            return f"left alone: {self.obstacle}"
        times = f"{self.ratio:.2f} ({self.low:.2f} to {self.high:.2f}) of the untouched time, measured here"
        return times if self.pays else f"left alone: {times}" + ", undecided" * (not self.settled)


def read_decisions(path: Path) -> dict[str, Decision]:
    """Return the decisions in a file that processes share; a damaged one counts as empty."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        return {key: Decision(**value) for key, value in json.loads(path.read_text(encoding="utf-8")).items()}
    return {}


_decisions = functools.cache(read_decisions)  # a plan and the patch after it decide alike, also without a clear result


def keep_decision(path: Path, key: str, decision: Decision) -> None:
    """Keep a decision, in the file only a settled one."""
    _decisions(path)[key] = decision
    if decision.settled:
        kept = {**read_decisions(path), key: decision}
        with contextlib.suppress(OSError):  # it only costs another measurement next time
            write_json(path, {known: dataclasses.asdict(value) for known, value in kept.items()})


class Tuner:
    def __init__(self, denoiser: nn.Module) -> None:
        self.compiling = False  # whether a call comes from torch.compile, wherever that was applied
        self._denoiser = denoiser
        self._path = cache_folder() / "autotune.json"
        self._keys: dict[object, str] = {}  # by all that can change from call to call

    def pays(self, state: LayerCall, phase: Phase, sample: Tensor) -> bool:
        decision = self.decide(state, phase, sample)
        if decision.obstacle:
            state.patched.patch.warn("autotune", layer=state.layer.name, decision=decision)
        return decision.pays

    def decide(self, state: LayerCall, phase: Phase, sample: Tensor) -> Decision:
        """Look a decision up, or measure it; `state` must know its grid and stays as it is."""
        around = modules_around(self._denoiser, [state.layer.name])
        if self.compiling or any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in around):
            return Decision(obstacle="not measured, because torch.compile was applied")
        kind, original = sample.device.type, state.patched.original
        autocast = kind != "meta" and torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        backend = getattr(original, "_attention_backend", "")
        where = state.index, state.grid, original, backend, state.patched.fused, phase
        given = sample.shape, sample.dtype, sample.device, autocast, torch.get_num_threads(), _copies(state, phase)
        if (where, given) not in self._keys:
            self._keys[where, given] = decision_key(state, phase, sample)
        key = self._keys[where, given]
        decision = _decisions(self._path).get(key)
        if decision is None:
            try:
                decision = self._measure(state, phase, sample)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                decision = Decision(obstacle="memory ran out in the measurement")
            keep_decision(self._path, key, decision)
        return decision

    def _measure(self, state: LayerCall, phase: Phase, sample: Tensor) -> Decision:
        if sample.device.type == "meta":
            return Decision(obstacle="not measured, because the model has no weights")
        if state.layer.joint and phase.merge.ratio:
            return Decision(obstacle="not measured, because it merges tokens of an image that is joined with text")
        twin, uses = copy.copy(state), 1
        twin.call = Call(state.call.config)  # so that the matchings of the real call stay
        if state.layer.joint:  # projections are the same with and without the patch
            exact, approximated = attention_alone(twin, sample)
        else:
            hook: Any = getattr(self._denoiser, "_hf_hook", None)
            if hook is not None:  # accelerate keeps the weights elsewhere until the call
                hook.pre_forward(self._denoiser)
            query: Any = state.layer.attention.to_q
            brought = any(hasattr(query, name) for name in ("_hf_hook", "_diffusers_hook"))  # for each call of it
            if query.weight.device != sample.device and not brought:
                return Decision(obstacle="not measured, because its weights are offloaded")
            exact, approximated = _layer_alone(twin, phase, sample)
            uses = _uses(state, phase)
        kept = twin.begin(phase, 0, sample.device) and sample.device.type not in AT_ONCE

        def reusing() -> None:
            if kept:  # what is drawn is there already; see `RunDraws`
                twin.candidates = None
            else:
                twin.begin(phase, 0, sample.device)
            approximated()

        def matching() -> None:
            twin.call.matchings.clear()
            reusing()

        calls = [(matching, 1 / uses)]
        if uses > 1:
            calls.append((reusing, 1 - 1 / uses))
        if phase.residual_steps > 1:
            calls.append((exact, 1 / phase.residual_steps / _copies(state, phase)))
        return measure(exact, calls, sample.device)


def _layer_alone(state: LayerCall, phase: Phase, sample: Tensor) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return what a layer computes untouched, and by its approximation, on random tokens."""
    attention: Any = state.layer.attention
    size = (_batch(sample), state.grid.tokens, attention.query_dim)
    tokens = standard_normal(size, torch.Generator().manual_seed(0)).to(sample)
    block_input = tokens.mT.contiguous().mT if state.layer.channels_first else tokens
    given = state.layer.projections(attention, tokens, fused=state.patched.fused)

    def untouched() -> None:
        if state.call.config.attention_backend == "auto":
            state.exact(attention, tokens)
        else:
            approximate(given, state, EXACT, given.tokens)

    def approximated() -> None:
        state.block_input = block_input
        approximate(given, state, phase, given.tokens)

    return untouched, approximated


def _copies(state: LayerCall, phase: Phase) -> int:
    return state.call.copies if phase.shares_guidance else 1


def measure_phases(layer: PatchedLayer, denoiser: Any, size: Grid) -> dict[Phase, Decision]:
    """Decide on every phase for one image with guidance, without a patch."""
    module: Any = unwrap(denoiser)
    device = device_of(module.modules(), module.device)
    fill = functools.partial(torch.zeros, device=device, dtype=module.dtype)
    sample = family_of(module).call(module, (), family_of(module).arguments(module, size, 2, fill)).sample
    tuner, decisions = Tuner(denoiser if hasattr(denoiser, "_orig_mod") else module), {}
    state = LayerCall(layer, Call(layer.patch.config), layer.layer.grid(size))
    state.call.copies = len(sample)
    for phase in layer.config.phases:
        if not phase.exact:
            state.begin(phase, 0, device)
            decisions[phase] = tuner.decide(state, phase, sample)
    return decisions


def matching_uses(config: PatchConfig, layer: SelfAttention, layers: Iterable[SelfAttention]) -> int:
    alike = sum(other.downsample == layer.downsample for other in layers) if config.reuse_layers else 1
    return max(alike, 1) * config.reuse_steps


def decision_key(state: LayerCall, phase: Phase, sample: Tensor) -> str:
    """Return what a decision depends on, as text: device, versions, shape, exact attention, phase and run settings."""
    attention: Any = state.layer.attention
    config, device = state.call.config, sample.device
    settings = {**phase.to_dict(), "until": 1.0, "uses": _uses(state, phase), "copies": _copies(state, phase)}
    settings |= {name: getattr(config, name) for name in ("attention_backend", "fp32_logits", "use_rand")}
    settings |= {"channels_first": state.layer.channels_first and phase.matches}
    digest = sha256_of_data(settings)[:16]
    sizes = (len(sample), *state.grid, state.layer.text) if state.layer.joint else (_batch(sample), *state.grid[1:])
    shape = "x".join(map(str, (*sizes, attention.inner_dim)))
    dtype = str(sample.dtype)
    if torch.is_autocast_enabled(device.type):
        dtype += f" under autocast to {torch.get_autocast_dtype(device.type)}"
    original = state.patched.original
    exact = f"{type(original).__qualname__} {getattr(original, '_attention_backend', '')}"
    exact += ", fused projections" * state.patched.fused
    versions = f"torch {torch.__version__}, diffusers {diffusers.__version__}, elfatt-sd {elfatt_sd.__version__}"
    name = device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} of {device_name(device)}"
    parts = [name, versions, f"{shape}, {attention.heads} heads, {dtype}", exact]
    return "; ".join([*parts, f"{phase.attention.name} {digest}"])


def measure(
    untouched: Callable[[], None], approximated: Sequence[tuple[Callable[[], None], float]], device: torch.device
) -> Decision:
    """Time functions in turn, until it is clear which is faster, or there is no time left for it."""
    ratios, number = list[float](), 1 if device.type == "cpu" else _IN_A_ROW
    # no `Comparison`, which has a fixed number of rounds: each ratio of these decides whether another one follows
    with torch.no_grad():
        for index in range(WARM_UP + MOST_ROUNDS):
            before = timed(untouched, device, number)
            after = sum(share * timed(function, device, number) for function, share in approximated)
            if index >= WARM_UP:
                ratios.append(after / before)
                ranked = sorted(ratios)
                cut = max(0, int(len(ranked) / 2 - math.sqrt(len(ranked))))
                decision = Decision(statistics.median(ranked), ranked[cut], ranked[-1 - cut])
                clear = len(ranked) >= CLEAR[0] and (ranked[-1] < 1 / CLEAR[1] or ranked[0] > CLEAR[1])
                if clear or (len(ranked) >= ROUNDS and decision.settled):
                    break
    return decision


def _batch(sample: Tensor) -> int:
    """Images, or frames, in an input of the denoiser."""
    return sample.numel() // (sample.shape[1] * sample.shape[-2] * sample.shape[-1])


def _uses(state: LayerCall, phase: Phase) -> int:
    layers = (other.layer for other in state.patched.patch.layers)
    return matching_uses(state.call.config, state.layer, layers) if phase.matches else 1
