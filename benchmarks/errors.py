"""How far approximations are from exact attention, layer by layer and step by step, on a pipeline's own activations.

The pipeline runs untouched. Each method is applied to what its layers are given, and compared with exact attention: the
layer's output for the tokens of the image. So no error carries over from one step or layer to another.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from elfatt_sd.config import PatchConfig
from elfatt_sd.errors import ElfattError
from elfatt_sd.families import step_denoisers
from elfatt_sd.methods import Draws, Grid
from elfatt_sd.phases import Phase
from elfatt_sd.runtime.call import LayerCall, image_of
from elfatt_sd.runtime.layer import choose_layers
from elfatt_sd.tuning.probe import ExactRun

DRAWS = 4  # times that what is random is drawn
Row = dict[str, Any]


@torch.no_grad()
def measure_errors(
    pipe: Any,
    configs: Mapping[str, PatchConfig],
    run: Callable[[], Any],
    keep: Callable[[int, list[Row]], None],
    *,
    wanted: Callable[[str, int], bool] = lambda method, step: True,
    draws: int = DRAWS,
) -> None:
    """Run a pipeline untouched, and compare methods with exact attention in its layers.

    Args:
        pipe: a pipeline that is not patched; it is as before afterwards.
        configs: by name, methods that go with its family; each is compared in the layers and with the phase that it
            would use.
        run: runs the pipeline.
        keep: is given each step when it is over, by its index in the schedule, and its rows: `layer`, `step`, `method`,
            and the relative L2 `error`, which is the mean over images (with guidance, two for each prompt) and draws,
            and the `least` and `greatest` of them.
        wanted: tells whether a method is compared in a step.
        draws: how often a method is applied where it draws at random.

    Raises:
        ElfattError: a method has `residual_steps`, or does not fit the pipeline.
    """
    for config in configs.values():
        shared = max((phase.residual_steps for phase in config.all_phases), default=1)
        if shared > 1:
            raise ElfattError(f"residual_steps={shared} is not accepted here; errors are those of single steps.")
    measured = _Measured(pipe, configs, keep, wanted, draws)
    with measured.run:
        run()
    measured.end_step()


class _Measured:
    """What is measured in a run; see `measure_errors`."""

    def __init__(
        self,
        pipe: Any,
        configs: Mapping[str, PatchConfig],
        keep: Callable[[int, list[Row]], None],
        wanted: Callable[[str, int], bool],
        draws: int,
    ) -> None:
        denoisers = step_denoisers(pipe)
        chosen = {name: choose_layers(denoisers, config).values() for name, config in configs.items()}
        self._layers = {
            name: {layer.name for _, patched in layers for layer in patched} for name, layers in chosen.items()
        }
        self._configs, self._keep, self._wanted, self._draws = configs, keep, wanted, draws
        self._step = 0
        self._errors: dict[tuple[str, str], list[Tensor]] = defaultdict(list)  # of this step, by method and layer
        self.run = ExactRun(pipe, denoisers)
        self.run.see_layer = self._after_layer

    def end_step(self) -> None:
        """Hand over the rows of the step that goes on."""
        rows = []
        for (method, layer), errors in self._errors.items():
            each = torch.cat(errors)
            row = {"layer": layer, "step": self._step, "method": method, "error": float(each.mean())}
            rows.append(row | {"least": float(each.min()), "greatest": float(each.max())})
        self._errors.clear()
        if rows:
            self._keep(self._step, rows)

    def _after_layer(self, state: LayerCall, again: Callable[[], Any], output: Any) -> None:
        step, layer = state.call.step, state.layer.name
        if not state.call.scheduled:
            return
        if step != self._step:
            self.end_step()
            self._step = step
        exact = image_of(output, state).float()
        for name, config in self._configs.items():
            if layer in self._layers[name] and self._wanted(name, step):
                self._errors[name, layer] += self._compare(config, state, again, exact)

    def _compare(self, config: PatchConfig, state: LayerCall, again: Callable[[], Any], exact: Tensor) -> list[Tensor]:
        """Return the relative L2 errors of the images of the batch, for each draw."""
        step = state.call.step
        phase = config.for_layer(state.layer.name).phase_at(step, self.run.steps)
        draws = self._draws if _draws_at_random(config, phase, state.grid) else 1
        found = []
        for seed in range(config.seed, config.seed + draws):
            drawn = dataclasses.replace(config, seed=seed)
            approximated = self.run.approximate(state, again, phase, step, drawn)
            difference = image_of(approximated, state).float() - exact
            found.append((difference.flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)).cpu())
        return found


def _draws_at_random(config: PatchConfig, phase: Phase, grid: Grid) -> bool:
    """Tell whether a phase draws anything at random on a grid."""
    draws = _CountedDraws(0, 0, 0, torch.device("cpu"))
    phase.attention.prepare(grid, draws)
    return draws.counted or (phase.matches and config.use_rand)


class _CountedDraws(Draws):
    """Draws that tell whether there were any."""

    counted = False

    def uniform(self, what: str, count: int) -> Tensor:
        """Draw."""
        self.counted = True
        return super().uniform(what, count)

    @property
    def once(self) -> Draws:
        """The same, as it only counts."""
        return self
