"""Every attention equals its formula, written out densely in float64; parts join; backends are chosen."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.checks import DEVICES, LENGTHS, Work, approximations, close, qkv
from torch import Tensor

from elfatt_sd.attention import softmax as attention
from elfatt_sd.attention.ordering import partition
from elfatt_sd.attention.softmax import (
    agent_attention,
    attend,
    block_attention,
    elfatt_attention,
    key_bias,
    pool_agents,
    sampled_attention,
    softmax_attention,
)
from elfatt_sd.errors import ElfattError, is_out_of_memory


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, allowed: Tensor | None = None) -> Tensor:
    """Softmax attention in float64 with the whole matrix of logits; `allowed` is `[queries, keys]`."""
    q, k, v = (x.double() for x in (q, k, v))
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -math.inf)
    return torch.einsum("bhqk,bkhd->bqhd", logits.softmax(dim=-1), v)


def dense_blocks(q: Tensor, k: Tensor, v: Tensor, block_size: int, scale: float | None = None) -> Tensor:
    blocks, base, larger = partition(q.shape[1], block_size)
    sizes = torch.tensor([base + 1] * larger + [base] * (blocks - larger))
    block = torch.arange(blocks).repeat_interleave(sizes)
    return dense(q, k, v, scale, allowed=block[:, None] == block)


def dense_agents(q: Tensor, k: Tensor, v: Tensor, agents: Tensor, query_scale: float | None = None) -> Tensor:
    return dense(q, agents, dense(agents, k, v), query_scale)


def dense_pool(q: Tensor, agents: int) -> Tensor:
    pools = [part.mean(dim=1) for part in q.double().tensor_split(agents, dim=1)]
    return torch.stack(pools, dim=1)


def test_partition_tiles_any_length() -> None:
    for tokens, block_size in itertools.product(range(1, 300, 7), (1, 2, 16, 81, 128, 1000)):
        blocks, base, larger = partition(tokens, block_size)
        assert blocks * base + larger == tokens
        assert 0 <= larger < blocks == max(1, round(tokens / block_size)) and base >= 1
    assert partition(2048, 227) == (9, 227, 5), "the paper's blocks: no token is dropped"


@pytest.mark.parametrize("tokens", LENGTHS)
def test_agents_average_neighbouring_queries(tokens: int) -> None:
    q, _, _ = qkv(tokens)
    for agents in (1, 3, 16, 64):
        if agents >= tokens:
            assert pool_agents(q, agents) is q
        else:
            close(pool_agents(q, agents), dense_pool(q, agents))


@pytest.mark.parametrize("tokens", LENGTHS)
def test_softmax_with_masks_and_scales(tokens: int) -> None:
    q, k, v = qkv(tokens)
    close(softmax_attention(q, k, v, scale=0.3), dense(q, k, v, 0.3))
    allowed = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    for mask in (allowed, torch.zeros(tokens, tokens).masked_fill(~allowed, -math.inf)):
        close(softmax_attention(q, k, v, mask=mask), dense(q, k, v, allowed=allowed))


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("block_size", [1, 16, 30, 227, 1000])
@pytest.mark.parametrize("device", DEVICES)
def test_blocks_equal_softmax_with_a_block_diagonal_mask(tokens: int, block_size: int, device: str) -> None:
    inputs = qkv(tokens, batch=1 if block_size == 30 else 3)
    for scale in (None, 0.2):
        out = block_attention(*inputs.to(device), block_size, scale=scale)
        close(out.cpu(), dense_blocks(*inputs, block_size, scale))


@pytest.mark.parametrize(("tokens", "samples", "groups"), [(24, 5, 4), (64, 8, 8), (35, 6, 5), (35, 4, 8), (12, 12, 1)])
@pytest.mark.parametrize("options", [{}, {"scale": 0.7}, {"fp32_logits": True}])
def test_sampled_keys(tokens: int, samples: int, groups: int, options: dict[str, Any]) -> None:
    """Query n sees the keys of group n mod groups."""
    (q, _, _), (_, k, v) = qkv(tokens), qkv(samples * groups)
    own = torch.arange(tokens)[:, None] % groups == torch.arange(samples * groups) % groups
    close(sampled_attention(q, k, v, groups, **options), dense(q, k, v, options.get("scale"), own))


@pytest.mark.parametrize("tokens", [7, 257])
@pytest.mark.parametrize(
    ("heads", "size", "split", "share", "heads_of_agents", "channels_of_agents"),
    [
        (8, 40, "auto", 0.5, 4, None),
        (5, 64, "auto", 0.5, None, 32),
        (5, 64, "heads", 0.5, 2, None),
        (8, 40, "channels", 0.5, None, 16),
        (3, 24, "channels", 0.25, None, 8),
        (1, 5, "auto", 0.5, None, 2),
        (4, 8, "auto", 1.0, 4, None),
        (4, 8, "auto", 0.0, 0, None),
        (3, 16, "channels", 0.01, None, 1),
        (3, 16, "channels", 0.99, None, 15),
    ],
)
@pytest.mark.parametrize(("given", "query_scale", "shortcut"), [(False, 0.4, 0.1), (True, None, 0.0), (True, 0.4, 0.1)])
def test_elfatt(
    tokens: int,
    heads: int,
    size: int,
    split: str,
    share: float,
    heads_of_agents: int | None,
    channels_of_agents: int | None,
    given: bool,
    query_scale: float | None,
    shortcut: float,
) -> None:
    """One part attends through agents, the other in blocks (eq. lepe2sd: heads; eq. lepe1sd: channels)."""
    q, k, v = qkv(tokens, heads, size)
    agents = torch.randn(2, 6, heads, size, generator=torch.Generator().manual_seed(1))
    dim, first = (2, heads_of_agents) if heads_of_agents is not None else (3, channels_of_agents)
    assert first is not None
    rest = q.shape[dim] - first
    expected = []
    if first:
        qa, ka, va = (x.narrow(dim, 0, first) for x in (q, k, v))
        own = agents.narrow(dim, 0, first) if given else dense_pool(qa, min(6, tokens))
        expected.append(dense_agents(qa, ka, va, own, query_scale) + shortcut * va.double())
    if rest:
        expected.append(dense_blocks(*(x.narrow(dim, first, rest) for x in (q, k, v)), block_size=30))
    options: dict[str, Any] = {
        "agent_share": share,
        "split": split,
        "query_scale": query_scale,
        "value_shortcut": shortcut,
    }
    actual = elfatt_attention(q, k, v, agents=agents if given else 6, block_size=30, **options)
    close(actual, torch.cat(expected, dim=dim))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fp32_logits", [False, True])
def test_logits_near_the_limit_of_the_dtype(dtype: torch.dtype, fp32_logits: bool) -> None:
    """Logits beyond 60,000, which float16 just holds, give no NaN and no infinity."""
    q, k, v = qkv(100, size=64, dtype=dtype)
    q, k = (torch.nn.functional.normalize(x.float(), dim=-1).mul(700).to(dtype) for x in (q, k))
    assert 6e4 < float((q.double() ** 2).sum(dim=-1).max()) * 64**-0.5 < 65504
    for name, out in approximations(q, k, v, fp32_logits=fp32_logits).items():
        assert out.dtype == dtype, name
        assert out.isfinite().all(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp32_logits_round_the_result_alone(dtype: torch.dtype) -> None:
    q, k, v = qkv(100, size=64, dtype=dtype)
    q = q * 8
    exact = approximations(*(x.double() for x in (q, k, v)))
    for name, out in approximations(q, k, v, fp32_logits=True).items():
        if name in ("softmax", "block"):
            torch.testing.assert_close(out, exact[name].to(dtype), msg=name)


def test_fp32_logits_under_autocast() -> None:
    """Which would bring everything down to half precision again."""
    q, k, v = qkv(100, size=64, dtype=torch.float32)
    expected = approximations(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        found = approximations(q, k, v, fp32_logits=True)
    for name in ("softmax", "block"):
        assert torch.equal(found[name], expected[name])


@pytest.mark.parametrize("name", ["softmax", "block", "agent", "heads", "channels"])
def test_gradients(name: str) -> None:
    q, k, v = (x.double().requires_grad_() for x in qkv(11, heads=2, size=4, batch=1))
    small: dict[str, Callable[..., Tensor]] = {
        "softmax": softmax_attention,
        "block": lambda q, k, v: block_attention(q, k, v, 3),
        "agent": lambda q, k, v: agent_attention(q, k, v, pool_agents(q, 3), query_scale=0.8, value_shortcut=0.1),
        "heads": lambda q, k, v: elfatt_attention(q, k, v, agents=3, block_size=4, split="heads"),
        "channels": lambda q, k, v: elfatt_attention(q, k, v, agents=3, block_size=4, split="channels"),
    }
    assert torch.autograd.gradcheck(small[name], (q, k, v))


def test_compiles_whole() -> None:
    """For one size, and again for others, where the compiler makes the length a symbol."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return tuple(approximations(q, k, v).values())

    compiled = torch.compile(run, backend="eager", fullgraph=True)
    for tokens in (64, 100):
        q, k, v = qkv(tokens)
        for actual, expected in zip(compiled(q, k, v), run(q, k, v), strict=True):
            torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("call", "calls", "pairs"),
    [
        (lambda q, k, v: block_attention(q, k, v, 32), 1, 2048 * 32),  # equal blocks are views
        (lambda q, k, v: block_attention(q, k, v, 227), 2, 5 * 228**2 + 4 * 227**2),  # remainders are not padded
        (lambda q, k, v: agent_attention(q, k, v, pool_agents(q, 16)), 2, 2 * 2048 * 16),
        (lambda q, k, v: sampled_attention(q, k[:, :64], v[:, :64], 4), 1, 2048 * 16),
    ],
)
def test_the_work_is_fused_and_grows_with_the_tokens(call: Callable[..., Tensor], calls: int, pairs: int) -> None:
    inputs = qkv(2048)
    with Work() as work:
        call(*inputs)
    assert (work.calls, work.dense, work.pairs) == (calls, 0, 2 * 4 * pairs)
    assert work.copies == 0 or calls == 2


@pytest.mark.parametrize("masked", [False, True])
def test_more_rows_or_heads_than_a_cuda_grid_takes(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go in several calls; it is tried here with a limit of three."""
    q, k, v = torch.randn(3, 5, 5, 7, 4)
    mask = torch.randn(5, 7, 5, 5) if masked else None
    bias = key_bias(torch.rand(5, 5) < 0.7, q.dtype) if masked else None
    whole, part = softmax_attention(q, k, v, mask=mask), attend(q, k, v, bias=bias)
    monkeypatch.setattr(attention, "GRID_LIMIT", 3)
    monkeypatch.setattr(attention, "GRID_FREE", ())
    with Work() as work:
        torch.testing.assert_close(softmax_attention(q, k, v, mask=mask), whole)
        torch.testing.assert_close(attend(q, k, v, bias=bias), part)
    assert work.calls == 2 * math.ceil(5 / 3) * math.ceil(7 / 3)


def tokens(count: int, seed: int, size: int = 16, heads: int = 3) -> Tensor:
    return torch.randn(2, count, heads, size, generator=torch.Generator().manual_seed(seed))


def logits(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bqhd,bkhd->bqhk", q.double(), k.double()) * q.shape[3] ** -0.5


@pytest.mark.parametrize("size", [40, 160])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_two_parts_are_one_softmax(size: int, dtype: torch.dtype, device: str) -> None:
    q, k, v = (tokens(n, n, size).to(device, dtype) for n in (7, 20, 21))
    v = v[:, :20]
    joined = attend(q, k[:, :13], v[:, :13]).joined(attend(q, k[:, 13:], v[:, 13:]))
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
    wanted = torch.einsum("bqhk,bkhd->bqhd", logits(q, k).softmax(-1), v.double())
    torch.testing.assert_close(joined.mixed.double(), wanted, atol=tolerance, rtol=0)
    torch.testing.assert_close(joined.total.double(), logits(q, k).logsumexp(-1), atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_masked_keys_weigh_nothing(dtype: torch.dtype, device: str) -> None:
    """The second image's part has no key at all: it weighs nothing, and is no NaN."""
    q, k, v = (tokens(9, seed).to(device, dtype) for seed in range(3))
    mask = torch.tensor([[True, False] * 4 + [True], [False] * 9], device=device)
    part = attend(q, k, v, bias=key_bias(mask, dtype))
    assert part.mixed.isfinite().all()
    assert part.total.isfinite().all()
    assert torch.equal(attend(q, k, v).joined(part).mixed[1], attend(q, k, v).mixed[1])
    wanted = attend(q[:1], k[:1, ::2], v[:1, ::2])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(part.mixed[:1], wanted.mixed, atol=tolerance, rtol=0)
    torch.testing.assert_close(part.total[:1], wanted.total, atol=tolerance, rtol=0)
    plain = attend(*(x.double() for x in (q, k, v)), bias=key_bias(mask, torch.float64))
    torch.testing.assert_close(plain.mixed[0], part.mixed[0].double(), atol=tolerance, rtol=0)


def test_any_strides() -> None:
    """A kernel that is called directly reads channels that do not lie side by side as if they did."""
    q, k, v = (tokens(9, seed).permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for seed in range(3))
    torch.testing.assert_close(attend(q, k, v), attend(*(x.contiguous() for x in (q, k, v))))


def test_gradients_take_plain_operations() -> None:
    inputs = tuple(tokens(5, seed, size=4).double().requires_grad_() for seed in range(3))
    assert torch.autograd.gradcheck(lambda q, k, v: attend(q, k, v).joined(attend(q, v, k)).mixed, inputs)
    q, k, v = (x.detach().float().requires_grad_() for x in inputs)
    attend(q, k, v).total.sum().backward()
    assert k.grad is not None
    assert k.grad.abs().sum() > 0


def test_auto_takes_flash_where_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper and on Blackwell's data centre cards PyTorch takes cuDNN's attention, which is faster."""
    dispatch = pytest.importorskip("diffusers.models.attention_dispatch")
    card, there = (8, 0), True

    def served(device: str = "cuda", dtype: torch.dtype = torch.float16, size: int = 40) -> bool:
        tensor: Any = SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(2, 64, 8, size))
        monkeypatch.setattr(dispatch, "_CAN_USE_FLASH_ATTN", there)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: card)
        return attention.flash_takes(tensor)

    assert served() and served(dtype=torch.bfloat16) and served(size=256)
    assert not (served("cpu") or served(dtype=torch.float32) or served(size=320))
    for card, serves in (((7, 5), False), ((8, 6), True), ((9, 0), False), ((10, 3), False), ((12, 0), True)):
        assert served() is serves, card
    there = False
    assert not served()


def test_auto_chooses_for_every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head size that flash-attn does not take, or a mask, falls back to the native kernel."""
    served: list[tuple[int, str]] = []
    monkeypatch.setattr(attention, "flash_takes", lambda q: q.shape[-1] <= 8)
    monkeypatch.setattr(attention, "_dispatch", lambda q, *others: (served.append((q.shape[-1], others[-1])), q)[1])
    for size in (8, 16):
        q, k, v = qkv(50, size=size)
        block_attention(q, k, v, 16, backend="auto")
        softmax_attention(q, k, v, mask=torch.ones(50, 50, dtype=torch.bool), backend="auto")
    assert served == [(8, "flash")] * 2  # blocks of 17 and of 16 tokens


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("flash", r"attention_backend='flash' .* not installed: pip install it"),
        ("_native_cudnn", r"'_native_cudnn' does not take float32 tensors with head size 8 on cpu"),
        ("quick", r"attention_backend='quick' is not known; accepted: native, auto, "),
    ],
)
def test_errors_of_backends_name_the_remedy(backend: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("diffusers.models.attention_dispatch")
    monkeypatch.setitem(attention.PACKAGES, "flash", ("no_such_module", "pip install it"))
    with pytest.raises(ElfattError, match=message):
        softmax_attention(*qkv(50), backend=backend)


def test_a_late_error_of_the_device_is_no_matter_of_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch = pytest.importorskip("diffusers.models.attention_dispatch")

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(dispatch, "dispatch_attention_fn", fail)
    with pytest.raises(RuntimeError, match="illegal memory access") as raised:
        softmax_attention(*qkv(50), backend="_native_math")
    assert not isinstance(raised.value, ElfattError)


def test_dispatchers_native_backend_agrees() -> None:
    pytest.importorskip("diffusers.models.attention_dispatch")
    q, k, v = qkv(50)
    for name, out in approximations(q, k, v, backend="_native_math").items():
        torch.testing.assert_close(out, approximations(q, k, v)[name], msg=name)


def test_a_backend_out_of_memory_says_so() -> None:
    """More than any machine has: the caller may try a smaller call."""
    pytest.importorskip("diffusers.models.attention_dispatch")
    q = torch.zeros(1, 2**23, 1, 1)
    with pytest.raises(RuntimeError, match="allocate memory") as raised:
        softmax_attention(q, q, q, backend="_native_math")
    assert is_out_of_memory(raised.value)


def test_backend_without_a_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """diffusers before 0.35 has none."""
    monkeypatch.setitem(__import__("sys").modules, "diffusers.models.attention_dispatch", None)
    q, k, v = qkv(8)
    with pytest.raises(ElfattError, match=r"needs diffusers 0\.35"):
        softmax_attention(q, k, v, backend="flash")
    assert torch.equal(softmax_attention(q, k, v, backend="auto"), softmax_attention(q, k, v))


@pytest.mark.parametrize(
    ("approximate", "given"),
    [
        (block_attention, {"block_size": 8}),
        (agent_attention, {"agents": torch.zeros(1, 4, 2, 4)}),
        (elfatt_attention, {"agents": 4, "block_size": 8}),
    ],
)
def test_masks_are_refused_where_they_have_no_meaning(approximate: Any, given: Any) -> None:
    q = torch.zeros(1, 20, 2, 4)
    with pytest.raises(ElfattError, match="mask"):
        approximate(q, q, q, **given, mask=torch.ones(20, 20, dtype=torch.bool))
