"""The attention processor: one page that shows the method.

    tokens -> merge -> block order -> q, k, v -> attention -> output projection -> order back -> unmerge

The processor itself holds nothing: diffusers rebuilds processors without arguments when an IP-Adapter is loaded, and
`torch.compile` specialises on every processor object. What a layer needs is kept on its attention module.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.attention_processor import Attention, AttnProcessor2_0, FusedAttnProcessor2_0
from torch import Tensor

from elfatt_sd.attention import agent_attention, block_attention, elfatt_attention, pool_agents, softmax_attention
from elfatt_sd.cell_spread import cell_blocks, cell_spread_attention
from elfatt_sd.config import EXACT, PatchConfig, Phase
from elfatt_sd.layers import SelfAttention
from elfatt_sd.merging import Candidates, Matching, find_candidates, match_candidates
from elfatt_sd.ordering import block_permutation, inverse_permutation, lattice_order, order_merged
from elfatt_sd.sampled import sample_counts, sampled_attention, stratified_samples
from elfatt_sd.schedule import Position

STATE = "elfatt_state"  # attribute of a patched attention module
KEPT_CALLS = 32  # of one step, that keep something for the next steps; it bounds the memory of calls without a schedule
_DEFAULT: Any = AttnProcessor2_0


class Denoiser:
    """What the patched layers of one UNet or ControlNet share during a call.

    Args:
        config: the method.
        pays: tells whether a phase makes a layer faster, for an input of the denoiser; by default every one counts.
    """

    def __init__(self, config: PatchConfig, pays: Callable[[LayerState, Phase, Tensor], bool] | None = None) -> None:
        self.config = config
        self.pays = pays
        self.phase: Phase = EXACT
        self.layers: list[LayerState] = []
        self.matchings: dict[object, Matching | None] = {}  # of this call, and of its like in earlier steps
        self.last = False  # whether the run ends with this step
        self._step: tuple[int, int] | None = None
        self._calls: Counter[tuple[int, ...]] = Counter()  # of this step, by the shape of their input
        self._matchings = Shelf()
        self._residuals = Shelf()  # by the layer's index

    def begin(self, position: Position, run: int, sample: Tensor) -> None:
        """Prepare the layers for a call: phase, grids, and what is drawn at random.

        A step may take several calls: with the prompt and without, or one for each view of a panorama. What a call
        keeps is for the calls of later steps that have the same place among those of their step, and the same shape.

        Args:
            position: of the call in the schedule.
            run: number of the run, so that nothing is carried over from another one.
            sample: the denoiser's input, `[batch, ..., height, width]`.
        """
        self.phase = self.config.phase_at(position.step, position.steps)
        turn = position.step if position.turn is None else position.turn
        if self._step != (run, turn):
            self._calls.clear()
        self._step = run, turn
        shape = tuple(map(int, sample.shape))
        place = self._calls[shape], *shape
        self._calls[shape] += 1
        reuse_steps, residual_steps = self.config.reuse_steps, self.phase.residual_steps
        self.matchings = self._matchings.take((run, turn // reuse_steps), place, reuse_steps > 1)
        group = run, turn // residual_steps, self.phase
        residuals = self._residuals.take(group, place, residual_steps > 1)
        self.last = 1 < position.steps == position.step + 1
        for layer in self.layers:
            phase = self.phase
            layer.grid = layer.layer.grid(int(sample.shape[-2]), int(sample.shape[-1]))
            if self.pays is not None and not phase.exact and not self.pays(layer, phase, sample):
                phase = EXACT
            layer.begin(phase, turn, sample.device)
            layer.residuals = residuals.setdefault(layer.index, {})

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def repeat_step(self) -> None:
        """Let the next call stand for the first of its step, whatever was called before it."""
        self._step = None


class Shelf:
    """What the calls of a group of steps keep for each other, by their place in the step."""

    def __init__(self) -> None:
        self._group: object = None
        self._kept: dict[tuple[int, ...], dict[Any, Any]] = {}

    def take(self, group: object, place: tuple[int, ...], keep: bool) -> dict[Any, Any]:
        """Return what calls at a place have kept, to be added to; a new group of steps begins with nothing."""
        if group != self._group:
            self._kept.clear()
        self._group = group
        return self._kept.setdefault(place, {}) if keep and place[0] < KEPT_CALLS else {}


class LayerState:
    """What one patched layer knows.

    Args:
        layer: where it is.
        index: its number among all layers of the denoiser that have self-attention.
        original: the processor to call in exact phases and to put back.
        denoiser: what it shares with the other layers.
    """

    def __init__(self, layer: SelfAttention, index: int, original: Callable[..., Tensor], denoiser: Denoiser) -> None:
        self.layer = layer
        self.index = index
        self.original = original
        self.denoiser = denoiser
        self.phase: Phase = EXACT
        self.grid = (0, 0)
        self.block_input: Tensor | None = None  # of the transformer block, before its normalisation: ToMe's metric
        self.choice: Tensor | None = None
        self.candidates: Candidates | None = None  # of this call
        self.permutation: Tensor | None = None
        self.inverse: Tensor | None = None
        self.second: tuple[Tensor, Tensor] | None = None  # the second half of the heads: from the first order, and back
        self.blocks = 1  # of `cell_spread`
        self.samples: Tensor | None = None  # of `sampled`: positions of the keys
        self.groups = 1
        self.calls = 0  # of the layer in this call of the denoiser: several, where that splits its input
        self.residuals: dict[int, Tensor] = {}  # of each: exact minus approximated output; see `residual_steps`
        self.measured: set[int] = set()  # those that this call of the denoiser has measured
        # The layer's own flag outlives `unfuse_qkv_projections`.
        self.fused = isinstance(original, FusedAttnProcessor2_0)

    def begin(self, phase: Phase, step: int, device: torch.device) -> None:
        """Set the phase, and draw the merge destinations, the blocks and the sampled keys of this step on the grid."""
        config = self.denoiser.config
        self.phase = phase
        self.block_input = self.choice = self.permutation = self.inverse = self.samples = None
        self.candidates = self.second = None
        self.calls, self.measured = 0, set()
        if phase.exact:
            return
        rows, columns = self.grid
        if phase.uses_matching and config.use_rand:
            cells = (rows // phase.stride) * (columns // phase.stride)
            steps = max(config.reuse_steps, phase.residual_steps)
            draws = self._uniform("destinations", step // steps * steps, cells)
            self.choice = _upload((draws * phase.stride**2).long(), device)
        drawn = step // phase.residual_steps * phase.residual_steps if phase.redraw else 0
        if phase.attention == "sampled":
            count, self.groups = sample_counts(rows * columns, phase.block_size, phase.groups)
            places = self._uniform("samples", drawn, count)
            self.samples = _upload(stratified_samples(rows, columns, count, self.groups, places), device)
            moved = lattice_order(rows, columns, self.groups, device) if phase.lattice else None
            if moved is not None:
                self.permutation, self.inverse = moved
                self.samples = self.inverse[self.samples]
        if phase.uses_order:
            size = phase.block_size if phase.uses_blocks else max(1, rows * columns // phase.agents)
            if phase.attention == "cell_spread":
                self.blocks = cell_blocks(rows * columns, size)
                size = rows * columns // self.blocks
            self.permutation = self._block_order(phase.block_order, "blocks", drawn, size, device)
            self.inverse = None if self.permutation is None else inverse_permutation(self.permutation)
        if phase.attention == "block" and phase.second_order is not None:
            order = self._block_order(phase.second_order, "second blocks", drawn, phase.block_size, device)
            order = torch.arange(rows * columns, device=device) if order is None else order
            there = order if self.inverse is None else self.inverse[order]
            self.second = there, inverse_permutation(there)

    def _block_order(self, order: str, what: str, step: int, size: int, device: torch.device) -> Tensor | None:
        rows, columns = self.grid
        noise = _upload(self._uniform(what, step, rows * columns), device) if order == "spread" else None
        return block_permutation(order, rows, columns, size, noise=noise, device=device)

    def _uniform(self, what: str, step: int, count: int) -> Tensor:
        """Draw `count` numbers in [0, 1) that depend on seed, step and layer alone, without moving any global RNG.

        They lie on the CPU, as does what is worked out from few of them: every kernel is one more to launch.
        """
        key = f"{self.denoiser.config.seed}/{step}/{self.index}/{what}".encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "big")
        return torch.rand(count, generator=torch.Generator().manual_seed(seed), device="cpu")

    @property
    def call(self) -> int:
        """Which of the layer's calls in this call of the denoiser is going on; a checkpoint repeats the first."""
        return 0 if _recomputing() else self.calls

    def remember_block_input(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        """Forward pre-hook of the normalisation before the layer: keep the block's input until the matching is made."""
        if self.phase.uses_matching:
            self.block_input = inputs[0]

    def correct(self, approximated: Tensor, exact: Callable[[], Tensor]) -> Tensor:
        """Return an output with the error of the approximation taken off, by `residual_steps`.

        Args:
            approximated: the layer's output by the phase's approximation.
            exact: computes it by exact attention. It is called in the first of the steps that share a difference, where
                its result is returned; there also when a checkpoint computes the layer once more.
        """
        call = self.call
        if call in self.residuals and call not in self.measured:
            output = approximated + self.residuals[call]
        else:
            output = exact()
            self.residuals[call] = (output - approximated).detach()
            self.measured.add(call)
        if self.denoiser.last:  # what decodes the latents needs the memory
            self.residuals.pop(call, None)
        return output

    def matching(self, tokens: Tensor, ratio: float) -> Matching | None:
        """Return which tokens are merged at a ratio in this call (None: nothing is).

        The similarity is that of the block's input where it is known. It is computed once in a call, whatever the
        number of ratios, and not at all where the matching of another layer or step is reused.
        """
        if int(tokens.shape[1] * ratio) == 0:
            return None
        config, stride = self.denoiser.config, self.phase.stride
        reused = config.reuse_layers or config.reuse_steps > 1
        key = (self.grid if config.reuse_layers else self.index, self.call, tokens.shape[0], ratio, stride)
        if reused and key in self.denoiser.matchings:
            return self.denoiser.matchings[key]
        if self.candidates is None:
            known = self.block_input
            metric = known if known is not None and known.shape == tokens.shape else tokens
            self.candidates = find_candidates(metric, *self.grid, stride, self.choice)
        candidates = self.candidates
        matching = None if candidates is None else match_candidates(candidates, ratio)
        if reused:
            self.denoiser.matchings[key] = matching
        return matching


class ElfattProcessor:
    """Self-attention by the phase of the denoising run; eq. lepe1sd and lepe2sd of the paper for `elfatt`."""

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
    ) -> Tensor:
        """Apply the layer to hidden states `[batch, tokens, channels]` or `[batch, channels, height, width]`."""
        state: LayerState | None = getattr(attn, STATE, None)
        if state is None:  # a layer that is not patched: what diffusers does by default
            return _DEFAULT()(attn, hidden_states, encoder_hidden_states, attention_mask, temb)  # type: ignore[no-any-return]
        phase = state.phase
        if (
            (phase.exact and state.denoiser.config.attention_backend == "auto")
            or encoder_hidden_states is not None
            or attention_mask is not None
            or not state_fits(state, hidden_states)
        ):
            return state.original(attn, hidden_states, encoder_hidden_states, attention_mask, temb)
        residual = hidden_states
        if attn.spatial_norm is not None:
            hidden_states = attn.spatial_norm(hidden_states, temb)
        image_like = hidden_states.ndim == 4
        if image_like:
            hidden_states = hidden_states.flatten(2).transpose(1, 2)
        if attn.group_norm is not None:
            hidden_states = attn.group_norm(hidden_states.transpose(1, 2)).transpose(1, 2)
        tokens = hidden_states
        try:
            hidden_states = approximate(attn, state, phase, tokens)
            if phase.residual_steps > 1 and not phase.exact:
                hidden_states = state.correct(hidden_states, lambda: approximate(attn, state, EXACT, tokens))
        finally:  # also where memory ran out
            state.block_input = state.candidates = None
            state.calls += 1
        if image_like:
            hidden_states = hidden_states.transpose(1, 2).reshape(residual.shape)
        if attn.residual_connection:
            hidden_states = hidden_states + residual
        return hidden_states if attn.rescale_output_factor == 1 else hidden_states / attn.rescale_output_factor


def _recomputing() -> bool:
    """Tell whether a checkpoint computes a layer once more, for its gradients."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _upload(drawn: Tensor, device: torch.device) -> Tensor:
    """Move a tensor of the CPU to a device without waiting for it."""
    return drawn.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else drawn.to(device)


def state_fits(state: LayerState, hidden_states: Tensor) -> bool:
    """Tell whether the tokens are those of the layer's grid; something else may have changed them."""
    tokens = hidden_states.shape[2] * hidden_states.shape[3] if hidden_states.ndim == 4 else hidden_states.shape[1]
    return bool(tokens == state.grid[0] * state.grid[1])


def approximate(attn: Attention, state: LayerState, phase: Phase, tokens: Tensor) -> Tensor:
    """Merge, order, attend, project, and put every token back in its place; `[batch, tokens, channels]`."""
    matching = state.matching(tokens, phase.ratio)
    permutation, inverse = (None, None) if phase.exact else (state.permutation, state.inverse)
    if matching is not None:
        if phase.uses_order and phase.block_order != "sequence":
            matching = matching.reordered(order_merged(permutation, matching.positions))
        merged = matching.merge(tokens)
    else:
        merged = tokens if permutation is None else tokens.index_select(1, permutation)
    mixed: Tensor = attn.to_out[1](attn.to_out[0](attend(attn, state, phase, tokens, merged)))
    if matching is not None:
        return matching.unmerge(mixed)
    return mixed if inverse is None else mixed.index_select(1, inverse)


def attend(attn: Attention, state: LayerState, phase: Phase, tokens: Tensor, merged: Tensor) -> Tensor:
    """Self-attention among merged tokens by the phase's approximation, `[batch, merged tokens, channels]`."""
    config = state.denoiser.config
    query, key, value = project(attn, merged, state.samples if phase.attention == "sampled" else None, state.fused)
    options: dict[str, Any] = {"fp32_logits": config.fp32_logits, "backend": config.attention_backend}
    query_scale = query.shape[-1] ** (-0.5 * phase.agent_scale) if phase.agent_scale != 1 else None
    if phase.attention == "softmax":
        mixed = softmax_attention(query, key, value, **options)
    elif phase.attention == "block":
        mixed = _in_blocks(query, key, value, state.second, phase.block_size, options)
    elif phase.attention == "cell_spread":
        mixed = cell_spread_attention(query, key, value, state.blocks, fp32_logits=config.fp32_logits)
    elif phase.attention == "sampled":
        mixed = sampled_attention(query, key, value, state.groups, **options)
    elif phase.attention == "agent":
        agents = _agents(attn, state, phase, tokens)
        mixed = agent_attention(
            query,
            key,
            value,
            pool_agents(query, phase.agents) if agents is None else agents,
            query_scale=query_scale,
            value_shortcut=phase.value_shortcut,
            **options,
        )
    else:
        agents = _agents(attn, state, phase, tokens)
        mixed = elfatt_attention(
            query,
            key,
            value,
            agents=phase.agents if agents is None else agents,
            block_size=phase.block_size,
            agent_share=phase.agent_share,
            split=phase.split,
            query_scale=query_scale,
            value_shortcut=phase.value_shortcut,
            **options,
        )
    return mixed.flatten(2).to(query.dtype)


def _in_blocks(
    query: Tensor, key: Tensor, value: Tensor, second: tuple[Tensor, Tensor] | None, size: int, options: dict[str, Any]
) -> Tensor:
    """Attend inside blocks, the second half of the heads in blocks of its own order if it has one."""
    if second is None:
        return block_attention(query, key, value, size, **options)
    there, back = second
    halves = [query.shape[2] // 2, (query.shape[2] + 1) // 2]
    (q1, q2), (k1, k2), (v1, v2) = (torch.split(x, halves, dim=2) for x in (query, key, value))
    mixed = block_attention(q1, k1, v1, size, **options)
    q2, k2, v2 = (x.index_select(1, there) for x in (q2, k2, v2))
    return torch.cat([mixed, block_attention(q2, k2, v2, size, **options).index_select(1, back)], dim=2)


def _agents(attn: Attention, state: LayerState, phase: Phase, tokens: Tensor) -> Tensor | None:
    """Agent-SD's agents: the queries of tokens merged at `agent_ratio`; None where queries are pooled."""
    if phase.agent_source == "pooled":
        return None
    matching = state.matching(tokens, phase.agent_ratio)
    return _heads(attn, attn.to_q(tokens if matching is None else matching.merge(tokens)), attn.norm_q)


def project(
    attn: Attention, tokens: Tensor, samples: Tensor | None = None, fused: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v, each `[batch, tokens, heads, head_dim]`; k and v of the tokens at `samples` alone."""
    if fused:
        query, key, value = attn.to_qkv(tokens).chunk(3, dim=-1)
        if samples is not None:
            key, value = key.index_select(1, samples), value.index_select(1, samples)
    else:
        source = tokens if samples is None else tokens.index_select(1, samples)
        query, key, value = attn.to_q(tokens), attn.to_k(source), attn.to_v(source)
    return _heads(attn, query, attn.norm_q), _heads(attn, key, attn.norm_k), _heads(attn, value, None)


def _heads(attn: Attention, projected: Tensor, norm: torch.nn.Module | None) -> Tensor:
    split: Tensor = projected.view(*projected.shape[:2], attn.heads, -1)
    if norm is not None:
        split = norm(split)
    return split


def warn_displaced(names: list[str], by: str) -> None:
    """Say that something replaced our processors after patching."""
    warnings.warn(
        f"elfatt-sd: {len(names)} patched layers now have another attention processor ({by}), the first is {names[0]}; "
        "they are not accelerated. Call apply_patch again after whatever replaced them.",
        stacklevel=2,
    )
