"""How far an approximation is from exact attention, layer by layer and step by step, on a pipeline's own activations.

The pipeline runs untouched and the inputs of its self-attention layers are kept at a few steps. Each method is then
applied to these inputs, in float32, and compared with exact attention: the output of the layer after its output
projection, before the residual is added. So no error carries over from one step or layer to another.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from torch import Tensor, nn

from elfatt_sd.config import ElfattError, PatchConfig
from elfatt_sd.evaluation.images import denoiser
from elfatt_sd.families import SelfAttention, family_of, find_layers, levels_of, select_layers
from elfatt_sd.methods import Draws, Grid
from elfatt_sd.phases import Phase
from elfatt_sd.schedule import Position, Schedule
from elfatt_sd.standalone import StandaloneLayer

DRAWS = 4  # times that what is random is drawn


@dataclass(frozen=True)
class Inputs:
    """What a layer got in one call of its UNet, in float32.

    Attributes:
        layer: the layer, as a copy in float32 without residual connection.
        index: its number among all layers of the UNet that have self-attention.
        position: of the call in the schedule.
        latent: shape of the UNet's input.
        hidden_states: the layer's input, `[batch, tokens, channels]`.
        block_input: of the transformer block, before its normalisation; None where the layer is in none.
        exact: the layer's output with exact attention.
    """

    layer: SelfAttention
    index: int
    position: Position
    latent: torch.Size
    hidden_states: Tensor
    block_input: Tensor | None
    exact: Tensor


@dataclass(frozen=True)
class Recording:
    """The inputs of a UNet's self-attention layers at some steps.

    Attributes:
        inputs: by step, then in the order of the layers.
        levels: the downsampling factors at which the UNet has self-attention, rising.
    """

    inputs: tuple[Inputs, ...]
    levels: tuple[int, ...]


def method_errors(
    recording: Recording, method: str, config: PatchConfig, *, draws: int = DRAWS
) -> list[dict[str, Any]]:
    """Compare one method with exact attention on recorded inputs.

    Args:
        recording: of a pipeline's own activations.
        method: its name.
        config: the method; it is compared in the layers and with the phase that it would use.
        draws: how often it is applied where it draws at random.

    Returns:
        Rows with `layer`, `step`, `method`, and the relative L2 `error`: the mean over images (with guidance, two
        for each prompt) and draws, and the `least` and `greatest` of them.

    Raises:
        ElfattError: the method has `residual_steps`.
    """
    shared = max((phase.residual_steps for phase in config.all_phases), default=1)
    if shared > 1:
        raise ElfattError(f"residual_steps={shared} is not accepted here; errors are those of single steps.")
    rows = []
    for inputs in recording.inputs:
        if not select_layers([inputs.layer], config, list(recording.levels)):
            continue
        phase = config.for_layer(inputs.layer.name).phase_at(inputs.position.step, inputs.position.steps)
        grid = inputs.layer.grid(Grid.image(*inputs.latent[-2:]))
        seeds = range(config.seed, config.seed + (draws if _draws_at_random(config, phase, grid) else 1))
        each = torch.cat([_relative_errors(inputs, dataclasses.replace(config, seed=seed)) for seed in seeds])
        row = {"layer": inputs.layer.name, "step": inputs.position.step, "method": method}
        rows.append(row | {"error": float(each.mean()), "least": float(each.min()), "greatest": float(each.max())})
    return rows


@torch.no_grad()
def record_inputs(
    pipe: Any,
    configs: Iterable[PatchConfig],
    prompts: Sequence[str],
    steps: int,
    record_at: Sequence[int],
    seed: int,
    **options: Any,
) -> Recording:
    """Run a pipeline untouched and keep the inputs of the layers that any of the methods would patch.

    Args:
        pipe: a pipeline that is not patched; it is as before afterwards.
        configs: the methods.
        prompts: one image each, all in one batch.
        steps: denoising steps.
        record_at: indices of the UNet calls to keep.
        seed: of the first image's latent; the next ones count up.
        **options: of the pipeline, such as `guidance_scale`.

    Raises:
        ElfattError: a step that the schedule does not have.
    """
    unet = denoiser(pipe)
    layers = find_layers(unet)
    levels = levels_of(layers)
    wanted = {layer.name for config in configs for layer in select_layers(layers, config, levels)}
    copies = {layer.name: _in_float32(layer) for layer in layers if layer.name in wanted}
    recorder = _Recorder(Schedule(lambda: pipe.scheduler), frozenset(record_at))
    generators = [torch.Generator().manual_seed(seed + index) for index in range(len(prompts))]
    with ExitStack() as hooks:
        hooks.callback(unet.register_forward_pre_hook(recorder.begin, with_kwargs=True).remove)
        for index, layer in enumerate(layers):
            if layer.name in wanted:
                for handle in recorder.watch(layer, copies[layer.name], index):
                    hooks.callback(handle.remove)
        pipe(list(prompts), num_inference_steps=steps, generator=generators, output_type="latent", **options)
    if missing := sorted(set(record_at) - {inputs.position.step for inputs in recorder.inputs}):
        calls = len(pipe.scheduler.timesteps)
        raise ElfattError(f"record_at={missing[0]} is not accepted; the run has the UNet calls 0 to {calls - 1}.")
    return Recording(tuple(recorder.inputs), tuple(levels))


class _Recorder:
    """Keeps what the watched layers get in the wanted calls of their UNet."""

    def __init__(self, schedule: Schedule, wanted: frozenset[int]) -> None:
        self._schedule = schedule
        self._wanted = wanted
        self._position: Position | None = None
        self._latent = torch.Size()
        self._block_inputs: dict[str, Tensor] = {}
        self.inputs: list[Inputs] = []

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the UNet: find the step."""
        given = family_of(module).call(module, args, kwargs)
        position = self._schedule.locate(given.timestep)
        self._position = position if position is not None and position.step in self._wanted else None
        self._latent = given.sample.shape

    def watch(self, layer: SelfAttention, copied: SelfAttention, index: int) -> list[Any]:
        """Hang hooks on a layer and the normalisation before it; return their handles."""

        def keep_block_input(module: nn.Module, args: tuple[Any, ...]) -> None:
            if self._position is not None:
                self._block_inputs[layer.name] = args[0].to(torch.float32, copy=True)

        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._position is None:
                return
            hidden_states = (args[0] if args else kwargs["hidden_states"]).to(torch.float32, copy=True)
            block_input, exact = self._block_inputs.get(layer.name), copied.attention(hidden_states)
            self.inputs.append(Inputs(copied, index, self._position, self._latent, hidden_states, block_input, exact))

        handles = [layer.attention.register_forward_pre_hook(keep, with_kwargs=True)]
        return handles if layer.norm is None else [layer.norm.register_forward_pre_hook(keep_block_input), *handles]


def _in_float32(layer: SelfAttention) -> SelfAttention:
    """Copy a layer, with exact attention and without its residual connection."""
    attention: Any = copy.deepcopy(layer.attention).float()
    exact: Any = AttnProcessor2_0
    attention.set_processor(exact())
    attention.residual_connection = False
    return dataclasses.replace(layer, attention=attention)


def _relative_errors(inputs: Inputs, config: PatchConfig) -> Tensor:
    """Return the relative L2 error of each image of the batch."""
    layer = StandaloneLayer(inputs.layer, config, inputs.index)
    layer.begin(inputs.position, inputs.latent, inputs.block_input)
    with torch.no_grad():
        difference = layer(inputs.hidden_states) - inputs.exact
    errors: Tensor = difference.flatten(1).norm(dim=1) / inputs.exact.flatten(1).norm(dim=1)
    return errors


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
