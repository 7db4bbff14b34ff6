"""What tuning can choose for a layer in a stretch of the run: approximations from the registry, and how steps share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from elfatt_sd.choosing import fits
from elfatt_sd.config import PatchConfig
from elfatt_sd.methods import Merge, attentions, is_own
from elfatt_sd.phases import DENSE, EXACT, Phase
from elfatt_sd.settings import Narrower

RATIOS = (0.5, 0.7)  # of tokens that are merged before exact attention
SHARED = (1, 2, 4, 8)  # steps that share a difference to exact attention, or a whole output


@dataclass(frozen=True)
class Candidate:
    """A phase that a layer can have."""

    phase: Phase  # until the end of the run
    # number of the approximation among those that are measured; -1 computes nothing (the output of an earlier step is
    # used again)
    base: int

    @property
    def shares(self) -> bool:
        return self.phase.residual_steps > 1


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
            found += [Candidate(Phase(1.0, kind, residual_steps=count, attention_dtype=dtype), -1) for kind in reused]
    return found
