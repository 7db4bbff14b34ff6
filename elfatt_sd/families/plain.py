"""Layers that are diffusers' `Attention` with image tokens alone: those of UNets and of PixArt."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from elfatt_sd.methods import Grid


class PlainProjections:
    """What `AttnProcessor2_0` does around attention; see `families.base.Projections`."""

    def __init__(self, attention: Any, hidden_states: Tensor, temb: Tensor | None = None, fused: bool = False) -> None:
        self._attention = attention
        self._fused = fused
        self._given = hidden_states
        if attention.spatial_norm is not None:
            hidden_states = attention.spatial_norm(hidden_states, temb)
        if hidden_states.ndim == 4:
            hidden_states = hidden_states.flatten(2).transpose(1, 2)
        if attention.group_norm is not None:
            hidden_states = attention.group_norm(hidden_states.transpose(1, 2)).transpose(1, 2)
        self.tokens = hidden_states

    @staticmethod
    def obstacle(
        grid: Grid, hidden_states: Tensor, encoder_hidden_states: Tensor | None, attention_mask: Tensor | None
    ) -> str:
        """Return why a layer cannot be approximated in this call; empty if it can."""
        if encoder_hidden_states is not None:
            return "it was given other tokens to attend to"
        if attention_mask is not None:
            return "it was given an attention mask"
        shape = hidden_states.shape
        tokens = shape[2] * shape[3] if hidden_states.ndim == 4 else shape[1]
        wanted = f"{grid.rows}x{grid.columns}"
        return "" if tokens == grid.tokens else f"it was given {tokens} tokens in place of {wanted}"

    def project(self, tokens: Tensor, keys: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v; k and v of the tokens at the places `keys` alone."""
        attention = self._attention
        if self._fused and keys is not None and type(attention.to_qkv) is nn.Linear:
            query, key, value = _sliced(attention.to_qkv, tokens, tokens.index_select(1, keys))
        elif self._fused:  # with a LoRA, or in few bits
            query, key, value = attention.to_qkv(tokens).chunk(3, dim=-1)
            if keys is not None:
                key, value = key.index_select(1, keys), value.index_select(1, keys)
        else:
            source = tokens if keys is None else tokens.index_select(1, keys)
            query, key, value = attention.to_q(tokens), attention.to_k(source), attention.to_v(source)
        return self._heads(query, attention.norm_q), self._heads(key, attention.norm_k), self._heads(value, None)

    def queries(self, tokens: Tensor) -> Tensor:
        return self._heads(self._attention.to_q(tokens), self._attention.norm_q)

    def output(self, mixed: Tensor) -> Tensor:
        """Project what attention returned; with dropout, as the layer has it."""
        projection, dropout = self._attention.to_out
        projected: Tensor = dropout(projection(mixed.flatten(2)))
        return projected

    def close(self, tokens: Tensor) -> Tensor:
        if self._given.ndim == 4:
            tokens = tokens.transpose(1, 2).reshape(self._given.shape)
        if self._attention.residual_connection:
            tokens = tokens + self._given
        factor = self._attention.rescale_output_factor
        return tokens if factor == 1 else tokens / factor

    def _heads(self, projected: Tensor, norm: nn.Module | None) -> Tensor:
        split: Tensor = projected.view(*projected.shape[:2], self._attention.heads, -1)
        return split if norm is None else norm(split)


def _sliced(fused: nn.Linear, tokens: Tensor, some: Tensor) -> tuple[Tensor, ...]:
    """Project all tokens to queries, and some of them to keys and values, by the parts of a fused weight."""
    cut = fused.out_features // 3
    bias = (None, None) if fused.bias is None else (fused.bias[:cut], fused.bias[cut:])
    query = functional.linear(tokens, fused.weight[:cut], bias[0])
    return query, *functional.linear(some, fused.weight[cut:], bias[1]).chunk(2, dim=-1)
