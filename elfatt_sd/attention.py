"""Agent, block and ELFATT-SD attention. Pure tensors.

Shapes: q, k, v and every result are `[batch, tokens, heads, head_dim]`, so that blocks and groups of heads are views.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from elfatt_sd import kernels
from elfatt_sd.devices import is_device_error, is_out_of_memory
from elfatt_sd.errors import ElfattError
from elfatt_sd.tiling import partition

_ALWAYS = "'native' needs no package, 'auto' takes what there is."
GRID_LIMIT = 65535  # CUDA's limit on the second and third grid dimension, where fused kernels put the batch
GRID_FREE = ("cpu",)  # devices without such a limit
_CUDNN_CAPABILITIES = (9, 10)  # major numbers of the cards for which PyTorch prefers cuDNN's attention
PACKAGES = {  # of the dispatcher's backends: module, and how it is installed
    "flash": ("flash_attn", "pip install flash-attn --no-build-isolation"),
    "flash_hub": ("kernels", "pip install kernels"),
    "_flash_3": ("flash_attn_interface", "build the `hopper` folder of flash-attention"),
    "_flash_3_hub": ("kernels", "pip install kernels"),
    "sage": ("sageattention", "pip install sageattention"),
    "sage_hub": ("kernels", "pip install kernels"),
    "xformers": ("xformers", "pip install xformers"),
}


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    fp32_logits: bool = False,
    backend: str = "native",
) -> Tensor:
    """Exact attention through a fused kernel: `softmax(scale * q k^T + mask) v`.

    Args:
        q: queries `[batch, queries, heads, head_dim]`.
        k: keys `[batch, keys, heads, head_dim]`.
        v: values, shaped as the keys.
        scale: None is `head_dim ** -0.5`.
        mask: boolean (True attends) or additive, broadcastable to `[batch, heads, queries, keys]`.
        fp32_logits: compute in float32 and return the dtype of `q`; where the fused kernel does so by itself
            (`sums_in_float32`), nothing changes.
        backend: `native` (PyTorch), `auto` (flash-attn where it is installed and takes these tensors, else native), or
            the name of a backend of diffusers' attention dispatcher.

    Returns:
        As the queries.

    Raises:
        ElfattError: the backend is not there or rejects these tensors.
    """
    if (
        fp32_logits
        and not sums_in_float32(q)
        and (q.dtype != torch.float32 or torch.is_autocast_enabled(q.device.type))
    ):
        mask = mask.float() if mask is not None and mask.is_floating_point() else mask
        with torch.autocast(q.device.type, enabled=False):
            out = softmax_attention(q.float(), k.float(), v.float(), scale=scale, mask=mask, backend=backend)
        return out.to(q.dtype)
    for dim in (0, 2):  # CUDA's kernels put batch and heads in grid dimensions that have a limit
        if q.shape[dim] > GRID_LIMIT and q.device.type not in GRID_FREE:
            return _in_turns(q, k, v, scale, mask, backend, dim)
    if backend == "triton":  # it has no exact attention
        backend = "native"
    if backend == "auto":
        backend = "flash" if mask is None and flash_takes(q) else "native"
    if backend != "native":
        return _dispatch(q, k, v, scale, mask, backend)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)


def block_attention(q: Tensor, k: Tensor, v: Tensor, block_size: int, **kernel: Any) -> Tensor:
    """Softmax attention inside each block of consecutive tokens; the blocks tile the sequence (`partition`).

    Args:
        q: queries `[batch, tokens, heads, head_dim]`.
        k: keys, shaped as the queries.
        v: values, shaped as the queries.
        block_size: wanted tokens in a block.
        **kernel: `scale`, `fp32_logits`, `backend` of `softmax_attention`.

    Returns:
        As the queries.
    """
    _no_mask(kernel)
    blocks, _, _ = partition(q.shape[1], block_size)
    if blocks == 1:
        return softmax_attention(q, k, v, **kernel)
    parts = equal_parts(q.shape[1], blocks)
    return _join([_equal_blocks(q[:, part], k[:, part], v[:, part], size, kernel) for part, size in parts], dim=1)


def pool_agents(q: Tensor, agents: int) -> Tensor:
    """Average neighbouring queries (ELFATT-SD's `Pooling(Q)`); the neighbourhoods tile any length.

    Args:
        q: queries `[batch, tokens, heads, head_dim]`.
        agents: number of agents; with more agents than tokens, every token is one.

    Returns:
        Agents `[batch, agents, heads, head_dim]`.
    """
    tokens = q.shape[1]
    if agents >= tokens:
        return q
    parts = equal_parts(tokens, agents)
    means = [q[:, part].reshape(q.shape[0], -1, size, *q.shape[2:]).mean(dim=2) for part, size in parts]
    return _join(means, dim=1)


def agent_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    agents: Tensor,
    *,
    query_scale: float | None = None,
    value_shortcut: float = 0.0,
    **kernel: Any,
) -> Tensor:
    """Attention through agents: `softmax(s2 Q A^T) softmax(s A K^T) V + value_shortcut * V`.

    Args:
        q: queries `[batch, tokens, heads, head_dim]`.
        k: keys, shaped as the queries.
        v: values, shaped as the queries.
        agents: `[batch, agents, heads, head_dim]`.
        query_scale: scale `s2` of the queries' softmax over agents; None is the same as the first one.
        value_shortcut: fraction of the values that is added.
        **kernel: `scale` (s), `fp32_logits`, `backend` of `softmax_attention`.

    Returns:
        As the queries.
    """
    _no_mask(kernel)
    gathered = softmax_attention(agents, k, v, **kernel)
    if query_scale is not None:
        kernel = {**kernel, "scale": query_scale}
    out = softmax_attention(q, agents, gathered, **kernel)
    return torch.add(out, v, alpha=value_shortcut) if value_shortcut else out


def elfatt_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    agents: int | Tensor,
    block_size: int,
    agent_share: float = 0.5,
    split: str = "auto",
    query_scale: float | None = None,
    value_shortcut: float = 0.0,
    **kernel: Any,
) -> Tensor:
    """ELFATT-SD: one part of the heads or channels attends through agents, the other inside blocks.

    Args:
        q: queries `[batch, tokens, heads, head_dim]`.
        k: keys, shaped as the queries.
        v: values, shaped as the queries.
        agents: number of agents pooled from the queries, or the agents `[batch, agents, heads, head_dim]`.
        block_size: wanted tokens in a block.
        agent_share: fraction of the heads or channels that attend through agents.
        split: `heads` (eq. lepe2sd), `channels` of every head (eq. lepe1sd; each part is scaled by its own size), or
            `auto`: heads where that fraction of them is a whole number.
        query_scale: see `agent_attention`.
        value_shortcut: see `agent_attention`.
        **kernel: `scale`, `fp32_logits`, `backend` of `softmax_attention`.

    Returns:
        As the queries.

    Raises:
        ElfattError: the split is not known.
    """
    heads, head_dim = q.shape[2:]
    if split == "auto":
        split = "heads" if float(heads * agent_share).is_integer() else "channels"
    if split == "heads":
        dim, first = 2, round(heads * agent_share)
    elif split == "channels":
        dim, first = 3, _channels_for_agents(head_dim, agent_share)
    else:
        raise ElfattError(f"split={split!r} is not known; accepted: auto, heads, channels.")
    sizes = [first, q.shape[dim] - first]
    (qa, qb), (ka, kb), (va, vb) = (torch.split(x, sizes, dim=dim) for x in (q, k, v))
    done = []
    if sizes[0]:
        own = agents.narrow(dim, 0, first) if isinstance(agents, Tensor) else pool_agents(qa, agents)
        done.append(agent_attention(qa, ka, va, own, query_scale=query_scale, value_shortcut=value_shortcut, **kernel))
    if sizes[1]:
        done.append(block_attention(qb, kb, vb, block_size, **kernel))
    return _join(done, dim)


def equal_parts(tokens: int, count: int) -> list[tuple[slice, int]]:
    """Cut a sequence in `count` runs as `partition` does: where the runs of one size lie, and that size."""
    base, larger = tokens // count, tokens % count
    cut = larger * (base + 1)
    return [(slice(0, cut), base + 1), (slice(cut, None), base)] if larger else [(slice(None), base)]


def _join(parts: list[Tensor], dim: int) -> Tensor:
    """Concatenate, without a copy where there is one part."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def _channels_for_agents(head_dim: int, share: float) -> int:
    """Split a head's channels, both parts a multiple of 8 (what fused kernels need) where that is near the share."""
    if share in (0, 1):
        return int(head_dim * share)
    for unit in (8, 4, 2):
        first = unit * round(head_dim * share / unit)
        if head_dim % unit == 0 and 0 < first < head_dim and abs(first / head_dim - share) <= 1 / 8:
            return first
    return min(max(round(head_dim * share), 1), head_dim - 1)


def _equal_blocks(q: Tensor, k: Tensor, v: Tensor, size: int, kernel: dict[str, Any]) -> Tensor:
    """Attend inside blocks of one size, all in one call with the blocks in the batch dimension."""
    blocks = (x.reshape(-1, size, *x.shape[2:]) for x in (q, k, v))
    return softmax_attention(*blocks, **kernel).reshape(q.shape)


def _in_turns(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, mask: Tensor | None, backend: str, dim: int
) -> Tensor:
    """Attend in several calls, each of as many rows (dimension 0) or heads (dimension 2) as a kernel's grid takes."""
    pieces = list(zip(*(torch.split(x, GRID_LIMIT, dim) for x in (q, k, v)), strict=True))
    masks: list[Tensor | None] = [mask] * len(pieces)
    axis = {0: -4, 2: -3}[dim]  # of the mask, which may lack its first dimensions
    if mask is not None and mask.ndim >= -axis and mask.shape[axis] > 1:
        masks = list(torch.split(mask, GRID_LIMIT, axis))
    parts = (
        softmax_attention(*piece, scale=scale, mask=own, backend=backend)
        for piece, own in zip(pieces, masks, strict=True)
    )
    return torch.cat(list(parts), dim)


def _no_mask(kernel: dict[str, Any]) -> None:
    if kernel.get("mask") is not None:
        raise ElfattError("mask is not accepted by approximate attention; use softmax_attention for masked layers.")


def sums_in_float32(q: Tensor) -> bool:
    """Whether the fused kernels for tensors like this one keep logits and sums in float32 by themselves."""
    half = q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= 256
    return q.device.type == "cuda" and half and torch.cuda.get_device_capability(q.device) >= (8, 0)


def flash_takes(q: Tensor) -> bool:
    """Whether flash-attn is installed, takes tensors like this one, and is not slower than PyTorch's own kernels.

    On Hopper and on Blackwell's data centre cards PyTorch takes cuDNN's attention, which is faster than flash-attn 2.
    """
    if not sums_in_float32(q) or torch.cuda.get_device_capability(q.device)[0] in _CUDNN_CAPABILITIES:
        return False
    try:
        from diffusers.models import attention_dispatch
    except ImportError:  # diffusers before 0.35
        return False
    return bool(attention_dispatch._CAN_USE_FLASH_ATTN)


def make_ready(backend: str) -> None:
    """Check that a backend's package is there, and fetch its kernel from the Hub, once; a call of it does neither.

    Raises:
        ElfattError: it is not there, or the kernel cannot be fetched.
    """
    if backend in ("auto", "native"):
        return
    if backend == "triton":
        return kernels.check_there()
    name = _backend_named(backend)
    from diffusers.models import attention_dispatch

    fetch = getattr(attention_dispatch, "_maybe_download_kernel_for_backend", None)
    try:
        attention_dispatch._check_attention_backend_requirements(name)
        if fetch is not None:
            fetch(name)
    except Exception as error:  # whatever the Hub, or a package, raises
        raise _missing(backend) or ElfattError(
            f"attention_backend={backend!r} cannot be used ({_in_one_line(error)}). {_ALWAYS}"
        ) from error


def _backend_named(backend: str) -> Any:
    """Return the dispatcher's backend of a name."""
    try:
        from diffusers.models.attention_dispatch import AttentionBackendName
    except ImportError as error:
        raise ElfattError(f"attention_backend={backend!r} needs diffusers 0.35; pip install -U diffusers.") from error
    try:
        return AttentionBackendName(backend)
    except ValueError as error:
        accepted = ", ".join(known.value for known in AttentionBackendName)
        raise ElfattError(f"attention_backend={backend!r} is not known; accepted: native, auto, {accepted}.") from error


def _dispatch(q: Tensor, k: Tensor, v: Tensor, scale: float | None, mask: Tensor | None, backend: str) -> Tensor:
    """Attend through a backend of diffusers' dispatcher."""
    name = _backend_named(backend)
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    try:
        return dispatch_attention_fn(q, k, v, attn_mask=mask, scale=scale, backend=name)
    except Exception as error:
        if is_out_of_memory(error) or is_device_error(error):  # of any kernel before, which the device tells of late
            raise
        tensors = f"{str(q.dtype).removeprefix('torch.')} tensors with head size {q.shape[-1]} on {q.device.type}"
        raise _missing(backend) or ElfattError(
            f"attention_backend={backend!r} does not take {tensors} ({_in_one_line(error)}). {_ALWAYS}"
        ) from error


def _missing(backend: str) -> ElfattError | None:
    """Return the error that says which package a backend lacks; None where it is installed."""
    package, install = PACKAGES.get(backend, ("torch", ""))
    if importlib.util.find_spec(package) is not None:
        return None
    return ElfattError(f"attention_backend={backend!r} needs {package}, which is not installed: {install}. {_ALWAYS}")


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
