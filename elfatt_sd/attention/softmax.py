"""Softmax attention, and what is made of it: blocks, agents, ELFATT, samples, parts of the keys. Pure tensors.

`softmax_attention` takes the fused kernel that a backend names. `attend` returns a log-sum-exp too, by which parts of
the keys are joined to one softmax.
"""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from elfatt_sd.attention.ordering import partition
from elfatt_sd.devices import accelerators, interprets_triton, is_device_error
from elfatt_sd.errors import ElfattError, is_out_of_memory

TRITON = "triton"  # the backend of the kernels in `attention.triton`
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
        backend: `native` or `auto` (PyTorch), or the name of a backend of diffusers' attention dispatcher.

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
    if backend not in ("auto", "native", TRITON):  # Triton has no exact attention
        name = _backend_named(backend)
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        try:
            return dispatch_attention_fn(q, k, v, attn_mask=mask, scale=scale, backend=name)
        except Exception as error:
            if is_out_of_memory(error) or is_device_error(error):  # of any kernel before: the device tells of it late
                raise
            tensors = f"{str(q.dtype).removeprefix('torch.')} tensors with head size {q.shape[-1]} on {q.device.type}"
            raise _refusal(backend, f"does not take {tensors}", error) from error
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)


def triton_takes(backend: str, *tensors: Tensor) -> bool:
    """Tell whether a backend is Triton, and takes such tensors; for others, and for gradients, PyTorch attends."""
    return backend == TRITON and all(
        (each.is_cuda or interprets_triton())
        and each.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and not (torch.is_grad_enabled() and each.requires_grad)
        for each in tensors
    )


def block_attention(q: Tensor, k: Tensor, v: Tensor, block_size: int, **kernel: Any) -> Tensor:
    """Softmax attention inside each block of consecutive tokens; the blocks tile the sequence (`partition`).

    `kernel` is `scale`, `fp32_logits`, `backend` of `softmax_attention`, here and below.
    """
    blocks, _, _ = partition(q.shape[1], block_size)
    done = []
    for part, size in equal_parts(q.shape[1], blocks):  # blocks of one size are one call, with the blocks in the batch
        own = (x[:, part].reshape(-1, size, *x.shape[2:]) for x in (q, k, v))
        done.append(softmax_attention(*own, **kernel).reshape(q[:, part].shape))
    return done[0] if len(done) == 1 else torch.cat(done, dim=1)


def pool_agents(q: Tensor, agents: int) -> Tensor:
    """Average neighbouring queries to `[batch, agents, heads, head_dim]` (ELFATT-SD's `Pooling(Q)`).

    The neighbourhoods tile any length; with more agents than tokens, every token is one.
    """
    tokens = q.shape[1]
    if agents >= tokens:
        return q
    parts = equal_parts(tokens, agents)
    means = [q[:, part].reshape(q.shape[0], -1, size, *q.shape[2:]).mean(dim=2) for part, size in parts]
    return means[0] if len(means) == 1 else torch.cat(means, dim=1)


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

    `agents` is `[batch, agents, heads, head_dim]`; `query_scale` is s2, None the same as s, the `scale` of `kernel`.
    """
    gathered = softmax_attention(agents, k, v, **kernel)
    if query_scale is not None:
        kernel = {**kernel, "scale": query_scale}
    out = softmax_attention(q, agents, gathered, **kernel)
    return torch.add(out, v, alpha=value_shortcut) if value_shortcut else out


def efficient_attention(q: Tensor, k: Tensor, v: Tensor, **kernel: Any) -> Tensor:
    """EFFATT (eq. effatt, normalised): `softmax(Q) softmax(K^T) V`, over the channels of Q and over the tokens of K.

    That is attention through the unit vectors as agents, without a scale.
    """
    agents = torch.eye(q.shape[3], dtype=q.dtype, device=q.device)[None, :, None]
    return agent_attention(q, k, v, agents.expand(q.shape[0], -1, q.shape[2], -1), scale=1.0, **kernel)


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

    `agents` is their number, pooled from the queries, or themselves; `agent_share` the fraction of the heads or of the
    channels that attend through them. `split` is `heads` (eq. lepe2sd), `channels` of every head (eq. lepe1sd, where
    each part is scaled by its own size), or `auto`: heads where that fraction of them is a whole number.
    """
    dim, sizes = halves(q.shape[2], q.shape[3], agent_share, split)
    (qa, qb), (ka, kb), (va, vb) = (torch.split(x, sizes, dim=dim) for x in (q, k, v))
    done = []
    if sizes[0]:
        own = agents.narrow(dim, 0, sizes[0]) if isinstance(agents, Tensor) else pool_agents(qa, agents)
        done.append(agent_attention(qa, ka, va, own, query_scale=query_scale, value_shortcut=value_shortcut, **kernel))
    if sizes[1]:
        done.append(block_attention(qb, kb, vb, block_size, **kernel))
    return done[0] if len(done) == 1 else torch.cat(done, dim=dim)


def halves(heads: int, head_dim: int, first_fraction: float, split: str = "auto") -> tuple[int, list[int]]:
    """Return the dimension of `[batch, tokens, heads, head_dim]` that ELFATT cuts in two, and the two sizes."""
    if split == "auto":
        split = "heads" if float(heads * first_fraction).is_integer() else "channels"
    if split == "heads":
        first = round(heads * first_fraction)
        return 2, [first, heads - first]
    first = int(head_dim * first_fraction)
    if 0 < first_fraction < 1:  # both parts a multiple of 8, what fused kernels need, where that is near the fraction
        wanted = [unit * round(head_dim * first_fraction / unit) for unit in (8, 4, 2) if head_dim % unit == 0]
        near = (each for each in wanted if 0 < each < head_dim and abs(each / head_dim - first_fraction) <= 1 / 8)
        first = next(near, min(max(round(head_dim * first_fraction), 1), head_dim - 1))
    return 3, [first, head_dim - first]


def sampled_attention(q: Tensor, k: Tensor, v: Tensor, groups: int, **kernel: Any) -> Tensor:
    """Softmax attention of each group of queries to its own sample: `softmax(s q_n K_g^T) V_g`, `g = n mod groups`.

    A sample has one key of each compact cell of the grid, so that the cost of a query does not grow with the image.
    `ordering.lattice_order` puts queries in an order that spreads each group over the image. Keys and values are
    `[batch, samples * groups, heads, head_dim]`; those of group g are at g, g + groups, ...
    """
    mixed = softmax_attention(*in_groups(q, k, v, groups), **kernel)
    return mixed.reshape(q.shape[0], -1, *q.shape[2:])[:, : q.shape[1]]


def in_groups(q: Tensor, k: Tensor, v: Tensor, groups: int) -> list[Tensor]:
    """Make heads of groups; queries are copied where the groups do not divide them."""
    batch, tokens, heads, size = q.shape
    missing = -tokens % groups
    padded = F.pad(q, (0, 0, 0, 0, 0, missing)) if missing else q
    return [x.reshape(batch, -1, groups * heads, size) for x in (padded, k, v)]


def equal_parts(tokens: int, count: int) -> list[tuple[slice, int]]:
    """Cut a sequence in `count` runs as `partition` does: where the runs of one size lie, and that size."""
    base, larger = tokens // count, tokens % count
    cut = larger * (base + 1)
    return [(slice(0, cut), base + 1), (slice(cut, None), base)] if larger else [(slice(None), base)]


def sums_in_float32(q: Tensor) -> bool:
    """Whether the fused kernels for tensors like this one keep logits and sums in float32 by themselves."""
    half = q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= 256
    return q.device.type == "cuda" and half and torch.cuda.get_device_capability(q.device) >= (8, 0)


def make_ready(backend: str) -> None:
    """Check that a backend's package is there, and fetch its kernel from the Hub, once; a call of it does neither."""
    if backend in ("auto", "native"):
        return
    if backend == TRITON:
        missing = ""
        if importlib.util.find_spec("triton") is None:
            missing = "triton, which is not installed: pip install triton"
        elif not (interprets_triton() or "cuda" in accelerators()):
            missing = "a GPU with CUDA; leave it out, or give 'native'"
        if missing:
            raise ElfattError(f"attention_backend='triton' needs {missing}.")
        return
    name = _backend_named(backend)
    from diffusers.models import attention_dispatch

    fetch = getattr(attention_dispatch, "_maybe_download_kernel_for_backend", None)
    try:
        attention_dispatch._check_attention_backend_requirements(name)
        if fetch is not None:
            fetch(name)
    except Exception as error:  # whatever the Hub, or a package, raises
        raise _refusal(backend, "cannot be used", error) from error


def _backend_named(backend: str) -> Any:
    try:
        from diffusers.models.attention_dispatch import AttentionBackendName
    except ImportError as error:
        raise ElfattError(f"attention_backend={backend!r} needs diffusers 0.35; pip install -U diffusers.") from error
    return AttentionBackendName(backend)


def _refusal(backend: str, what: str, error: Exception) -> ElfattError:
    package, install = PACKAGES.get(backend, ("torch", ""))
    reason = f"{what} ({' '.join(str(error).split())[:200]})"
    if importlib.util.find_spec(package) is None:
        reason = f"needs {package}, which is not installed: {install}"
    return ElfattError(f"attention_backend={backend!r} {reason}. 'native' needs no package.")


class Part(NamedTuple):
    """What queries gather from one part of the keys."""

    mixed: Tensor  # the part's own softmax times its values, `[B, Q, H, D]`
    total: Tensor  # log-sum-exp `[B, Q, H]` of its logits, in float32 at least

    def weighted(self, log_weight: Tensor | float) -> Part:
        """Let every key stand for `exp(log_weight)` of them."""
        return Part(self.mixed, self.total + log_weight)

    def joined(self, other: Part) -> Part:
        """Return the softmax over the keys of both."""
        weight = torch.sigmoid(other.total - self.total).unsqueeze(3).to(self.mixed.dtype)
        return Part(torch.lerp(self.mixed, other.mixed, weight), torch.logaddexp(self.total, other.total))

    def view(self, shape: tuple[int, ...] | torch.Size) -> Part:
        """Return the same queries arranged as `[B, Q, H, D]` of another shape."""
        return Part(self.mixed.reshape(shape), self.total.reshape(shape[:3]))


def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, bias: Tensor | None = None) -> Part:
    """Attend to one part of the keys through a fused kernel; with gradients, through plain operations.

    `bias` is added to the logits: `[B or 1, 1, Q or 1, K]`, in the queries' dtype, with finite entries (`excluded`), as
    the kernels' log-sum-exps of a row of `-inf` are not.
    """
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))  # the kernels' own calls do not check it
    learning = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    queries, kind = q.shape[1], q.device.type
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if learning or kind not in ("cpu", "cuda") or q.dtype == torch.float64:  # fused log-sum-exps have no gradient
        precision = torch.promote_types(q.dtype, torch.float32)
        logits = q.to(precision) @ k.to(precision).transpose(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
        logits = logits if bias is None else logits + bias
        mixed, total = logits.softmax(dim=3).to(v.dtype) @ v, logits.logsumexp(dim=3)
    elif kind == "cpu":
        mixed, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=bias, scale=scale
        )
    else:
        large = q.dtype == torch.float32 or q.shape[3] % 8 or q.shape[3] > 256
        if bias is None and not large and torch.cuda.get_device_capability(q.device) >= (8, 0):
            made = _fastest_with_sums(q, k, v, scale)
        else:
            if bias is not None:  # the kernel wants rows that start at multiples of 16 bytes
                room = -bias.shape[3] % 16
                bias = F.pad(bias, (0, room))[..., : bias.shape[3]].expand(*q.shape[:2], queries, -1)
            made = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, False, scale=scale)
        mixed, total = made[:2]
    return Part(mixed.transpose(1, 2), total[:, :, :queries].transpose(1, 2).contiguous())


_REFUSED_BY_CUDNN: set[tuple[int, torch.dtype]] = set()  # head sizes and dtypes


def _fastest_with_sums(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return the mix and log-sum-exps through cuDNN on sm_90 and later, where it takes these, else FlashAttention 2."""
    kind, enabled = (q.shape[3], q.dtype), getattr(torch.backends.cuda, "cudnn_sdp_enabled", bool)
    compiled, kernels = torch.compiler.is_compiling(), torch.ops.aten  # compiled code cannot fall back
    if torch.cuda.get_device_capability(q.device) >= (9, 0) and enabled() and not compiled:
        try:
            if kind not in _REFUSED_BY_CUDNN:
                made = kernels._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, False, False, scale=scale)
                return made[0], made[1].reshape(q.shape[:3])  # cuDNN gives `[B, H, Q, 1]`
        except RuntimeError as error:
            if is_out_of_memory(error) or is_device_error(error):
                raise
            _REFUSED_BY_CUDNN.add(kind)
    mixed, total = kernels._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False, scale=scale)[:2]
    return mixed, total


def key_bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Turn a mask of keys `[B, K]`, True where one counts or what is added to its logits, into the bias of `attend`."""
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        return mask.to(dtype).clamp(min=excluded(dtype))[:, None, None, :]
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return bias.masked_fill_(~mask, excluded(dtype))[:, None, None, :]


def excluded(dtype: torch.dtype) -> float:
    """Return the bias that excludes a key; finite, so that a part without any key weighs nothing and is not NaN."""
    return torch.finfo(dtype).min / 2
