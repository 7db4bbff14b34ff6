"""Backends of attention through diffusers' dispatcher, and which one is taken."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_checks import approximations, qkv
from torch import Tensor

from elfatt_sd.attention import softmax as attention
from elfatt_sd.attention.softmax import (
    agent_attention,
    block_attention,
    elfatt_attention,
    pool_agents,
    softmax_attention,
)
from elfatt_sd.errors import ElfattError, is_out_of_memory


def test_auto_on_a_cpu_is_native() -> None:
    q, k, v = qkv(50)
    assert torch.equal(softmax_attention(q, k, v, backend="auto"), softmax_attention(q, k, v))


def test_auto_takes_flash_where_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch = pytest.importorskip("diffusers.models.attention_dispatch")
    monkeypatch.setattr(dispatch, "_CAN_USE_FLASH_ATTN", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))

    def served(device: str = "cuda", dtype: torch.dtype = torch.float16, size: int = 40) -> bool:
        tensor: Any = SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(2, 64, 8, size))
        return attention.flash_takes(tensor)

    assert served() and served(dtype=torch.bfloat16) and served(size=256)
    assert not (served("cpu") or served(dtype=torch.float32) or served(size=320))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not served()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(dispatch, "_CAN_USE_FLASH_ATTN", False)
    assert not served()


def test_auto_chooses_for_every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head size that flash-attn does not take, or a mask, falls back to the native kernel."""
    served: list[tuple[int, str]] = []

    def dispatch(q: Tensor, k: Tensor, v: Tensor, scale: Any, mask: Any, backend: str) -> Tensor:
        served.append((q.shape[-1], backend))
        return q

    monkeypatch.setattr(attention, "flash_takes", lambda q: q.shape[-1] <= 8)
    monkeypatch.setattr(attention, "_dispatch", dispatch)
    for size in (8, 16):
        q, k, v = qkv(50, size=size)
        block_attention(q, k, v, 16, backend="auto")
        softmax_attention(q, k, v, mask=torch.ones(50, 50, dtype=torch.bool), backend="auto")
    assert served == [(8, "flash")] * 2  # blocks of 17 and of 16 tokens


def test_dispatchers_native_backend_agrees() -> None:
    pytest.importorskip("diffusers.models.attention_dispatch")
    q, k, v = qkv(50)
    for name, out in approximations(q, k, v, backend="_native_math").items():
        torch.testing.assert_close(out, approximations(q, k, v)[name], msg=name)


@pytest.mark.parametrize(
    ("backend", "package"), [("flash", "flash-attn"), ("sage", "sageattention"), ("xformers", "xformers")]
)
def test_missing_backend_names_the_remedy(backend: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("diffusers.models.attention_dispatch")
    monkeypatch.setitem(attention.PACKAGES, backend, ("no_such_module", f"pip install {package}"))
    q, k, v = qkv(50)
    with pytest.raises(ElfattError, match=f"attention_backend='{backend}' .* not installed: pip install {package}"):
        block_attention(q, k, v, 16, backend=backend)


def test_backend_that_rejects_the_tensors() -> None:
    """A backend that is there and fails says for which tensors."""
    pytest.importorskip("diffusers.models.attention_dispatch")
    q, k, v = qkv(50)
    with pytest.raises(ElfattError, match=r"'_native_cudnn' does not take float32 tensors with head size 8 on cpu"):
        softmax_attention(q, k, v, backend="_native_cudnn")


def test_a_backend_out_of_memory_says_so() -> None:
    """More than any machine has: the caller may try a smaller call."""
    pytest.importorskip("diffusers.models.attention_dispatch")
    q = torch.zeros(1, 2**23, 1, 1)
    with pytest.raises(RuntimeError, match="allocate memory") as raised:
        softmax_attention(q, q, q, backend="_native_math")
    assert is_out_of_memory(raised.value)


def test_unknown_backend() -> None:
    pytest.importorskip("diffusers.models.attention_dispatch")
    q, k, v = qkv(8)
    with pytest.raises(ElfattError, match=r"attention_backend='quick' is not known; accepted: native, auto, "):
        softmax_attention(q, k, v, backend="quick")


def test_backend_without_a_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """diffusers before 0.35 has none."""
    monkeypatch.setitem(__import__("sys").modules, "diffusers.models.attention_dispatch", None)
    q, k, v = qkv(8)
    with pytest.raises(ElfattError, match=r"needs diffusers 0\.35"):
        softmax_attention(q, k, v, backend="flash")
    assert torch.equal(softmax_attention(q, k, v, backend="auto"), softmax_attention(q, k, v))


@pytest.mark.parametrize("approximate", ["block", "agent", "elfatt"])
def test_masks_are_refused_where_they_have_no_meaning(approximate: str) -> None:
    q, k, v = qkv(20)
    mask = torch.ones(20, 20, dtype=torch.bool)
    calls: dict[str, Callable[[], Tensor]] = {
        "block": lambda: block_attention(q, k, v, 8, mask=mask),
        "agent": lambda: agent_attention(q, k, v, pool_agents(q, 4), mask=mask),
        "elfatt": lambda: elfatt_attention(q, k, v, agents=4, block_size=8, mask=mask),
    }
    with pytest.raises(ElfattError, match="mask"):
        calls[approximate]()
