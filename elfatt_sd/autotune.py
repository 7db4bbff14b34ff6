"""Decide by measurement which layers a method makes faster on this device; the others are left alone.

A layer is timed with random tokens of the shape it really gets, the approximation and the untouched attention in turn.
Decisions are kept in a file, by device, versions, shape and phase.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

import elfatt_sd
from elfatt_sd.config import PatchConfig, Phase
from elfatt_sd.files import write_json
from elfatt_sd.processor import LayerState, approximate

ROUNDS, WARM_UP = 7, 2
CLEAR = 3, 1.25  # so many rounds do where each of them differs by this factor, to the same side


@dataclasses.dataclass(frozen=True)
class Decision:
    """Whether a phase pays in a layer.

    Attributes:
        ratio: median over the rounds of time with the approximation by time untouched.
        low: smallest of them.
        high: largest of them.
    """

    ratio: float
    low: float
    high: float

    @property
    def pays(self) -> bool:
        """Whether the approximation is faster."""
        return self.ratio < 1

    def __str__(self) -> str:
        """Say it in words."""
        times = f"{self.ratio:.2f} ({self.low:.2f} to {self.high:.2f}) of the untouched layer's time, measured here"
        return times if self.pays else f"left alone: {times}"


def cache_folder() -> Path:
    """Return where decisions are kept: `ELFATT_SD_CACHE`, or `~/.cache/elfatt-sd`."""
    return Path(os.environ.get("ELFATT_SD_CACHE", Path.home() / ".cache" / "elfatt-sd"))


class Decisions:
    """Decisions made on this machine, in memory and in a file.

    Args:
        path: of the file; an unreadable one counts as empty.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or cache_folder() / "autotune.json"
        self._known: dict[str, Decision] = {}
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            self._known = {key: Decision(**value) for key, value in json.loads(self.path.read_text()).items()}

    def get(self, key: str) -> Decision | None:
        """Return what was decided for a key, or None."""
        return self._known.get(key)

    def put(self, key: str, decision: Decision) -> None:
        """Keep a decision; a folder that cannot be written only costs another measurement next time."""
        self._known[key] = decision
        with contextlib.suppress(OSError):
            write_json(self.path, {known: dataclasses.asdict(value) for known, value in self._known.items()})


class Tuner:
    """Decides for the layers of one denoiser.

    Args:
        denoiser: the module, whose weights may have to be brought to their device first.
        decisions: made before; by default those of this machine's file.
    """

    def __init__(self, denoiser: nn.Module, decisions: Decisions | None = None) -> None:
        self._denoiser = denoiser
        self._decisions = decisions or Decisions()

    def pays(self, state: LayerState, phase: Phase, sample: Tensor) -> bool:
        """Tell whether a phase makes a layer faster for an input of the denoiser."""
        return self.decide(state, phase, sample).pays

    def decide(self, state: LayerState, phase: Phase, sample: Tensor) -> Decision:
        """Look a decision up, or measure it; `state` must know its grid and stays as it is.

        Args:
            state: of the layer.
            phase: to decide on.
            sample: the denoiser's input, `[batch, ..., height, width]`.
        """
        attention: Any = state.layer.attention
        batch = sample.numel() // (sample.shape[1] * sample.shape[-2] * sample.shape[-1])
        shape = (batch, *state.grid, int(attention.inner_dim))
        key = decision_key(state.denoiser.config, phase, shape, attention.heads, sample)
        decision = self._decisions.get(key)
        if decision is None:
            decision = self._measure(state, phase, sample, batch)
            self._decisions.put(key, decision)
        return decision

    def _measure(self, state: LayerState, phase: Phase, sample: Tensor, batch: int) -> Decision:
        attention: Any = state.layer.attention
        hook: Any = getattr(self._denoiser, "_hf_hook", None)
        if hook is not None:  # accelerate keeps the weights elsewhere until the call
            hook.pre_forward(self._denoiser)
        size = (batch, state.grid[0] * state.grid[1], attention.query_dim)
        tokens = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(sample)
        matchings = dict(state.denoiser.matchings)
        twin = copy.copy(state)

        def approximated() -> None:
            state.denoiser.matchings.clear()
            twin.begin(phase, 0, sample)  # what is drawn in every step is part of the price
            approximate(attention, twin, phase, tokens)

        decision = measure(lambda: state.original(attention, tokens), approximated, sample.device)
        state.denoiser.matchings = matchings
        return decision


def measure_phases(state: LayerState, denoiser: Any, height: int, width: int) -> list[Decision | None]:
    """Decide on every phase for one picture with guidance, without a patch.

    Args:
        state: of the layer.
        denoiser: its UNet or ControlNet.
        height: of the latent.
        width: of the latent.

    Returns:
        A decision for each phase of the configuration; None for exact ones.
    """
    sample = torch.zeros(2, denoiser.config.in_channels, height, width, device=denoiser.device, dtype=denoiser.dtype)
    tuner, decisions = Tuner(denoiser), []
    for phase in state.denoiser.config.phases:
        state.begin(phase, 0, sample)
        decisions.append(None if phase.exact else tuner.decide(state, phase, sample))
    return decisions


def decision_key(config: PatchConfig, phase: Phase, shape: tuple[int, ...], heads: int, tokens: Tensor) -> str:
    """Return what a decision depends on, as text: device, versions, shape, dtype, phase and run settings.

    Args:
        config: the method; its seed does not matter.
        phase: the phase.
        shape: batch, rows, columns and channels of the layer.
        heads: of the layer.
        tokens: any tensor with the layer's device and dtype.
    """
    device = tokens.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} x{torch.get_num_threads()}"
    settings = {**dataclasses.asdict(phase), "until": 1.0, "backend": config.attention_backend}
    settings |= {"fp32_logits": config.fp32_logits, "reuse": [config.reuse_steps, config.reuse_layers]}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    versions = f"torch {torch.__version__}, diffusers {diffusers.__version__}, elfatt-sd {elfatt_sd.__version__}"
    return f"{name}; {versions}; {'x'.join(map(str, shape))}, {heads} heads, {tokens.dtype}; {phase.attention} {digest}"


def measure(untouched: Any, approximated: Any, device: torch.device) -> Decision:
    """Time two functions in turn, until it is clear which is faster.

    Args:
        untouched: what is done without the patch.
        approximated: what is done with it.
        device: where both work.
    """
    ratios: list[float] = []
    with torch.no_grad():
        for index in range(ROUNDS + WARM_UP):
            seconds = [_seconds(function, device) for function in (untouched, approximated)]
            if index >= WARM_UP:
                ratios.append(seconds[1] / seconds[0])
            if _is_clear(ratios):
                break
    return Decision(statistics.median(ratios), min(ratios), max(ratios))


def _is_clear(ratios: list[float]) -> bool:
    rounds, factor = CLEAR
    return len(ratios) >= rounds and (max(ratios) < 1 / factor or min(ratios) > factor)


def _seconds(function: Any, device: torch.device) -> float:
    accelerator = getattr(torch, device.type, None)
    synchronize = getattr(accelerator, "synchronize", lambda: None)
    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - start
