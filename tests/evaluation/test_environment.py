"""What decides images beside the protocol, and the kernels of a row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elfatt_sd.attention import softmax as attention
from elfatt_sd.devices import describe_machine
from elfatt_sd.evaluation.measure import attention_kernels
from elfatt_sd.evaluation.protocols import Cell
from elfatt_sd.evaluation.records import same_images

SD = Cell("sd", "SD", "sd", role="baseline")
TOME = Cell("tome", "ToMe", "tome")
XFORMERS = Cell("xf", "ToMe", "tome", settings={"attention_backend": "xformers"})
NATIVE = Cell("native", "ToMe", "tome", settings={"attention_backend": "native"})
FLASH = Cell("flash", "ToMe", "tome", settings={"attention_backend": "flash"})
FLOAT = Cell("float", "ELFATT", "elfatt", settings={"fp32_logits": True})
SPREAD = Cell(
    "spread", "cells", "custom", phases=({"until": 1.0, "attention": "cell_spread", "block_order": "spread"},)
)
PEER = Cell("peer", "tomesd", "tome", peer="tomesd")
EVERY = {"sd", "tome", "xf", "native", "peer"}


def described(**changes: Any) -> dict[str, Any]:
    packages = {"torch": "2", "diffusers": "0", "transformers": "5", "tomesd": "1", "numpy": "2", "flash-attn": "2"}
    hashes = {f"{name}_sha256": "00" for name in ("model", "prompts", "code", "method")}
    found = {"elfatt_sd": "0.1", "commit": "abc", "device": "2 cores", "cpu_threads": 2, "cuda": None, **hashes}
    return {**found, **changes, "packages": {**packages, **changes.get("packages", {})}}


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({"packages": {"torch": "3"}}, EVERY),
        ({"packages": {"transformers": "6"}}, EVERY),
        ({"packages": {"tomesd": "2"}}, {"peer"}),
        ({"packages": {"flash-attn": "3"}}, {"tome"}),
        ({"packages": {"xformers": "1"}}, {"xf"}),
        ({"packages": {"numpy": "3"}}, set()),
        ({"method_sha256": "11"}, {"tome", "xf", "native"}),
        ({"model_sha256": "11"}, EVERY),
        ({"code_sha256": "11"}, EVERY),
        ({"cpu_threads": 1}, EVERY),
        ({"commit": "def", "elfatt_sd": "0.2"}, set()),
    ],
)
def test_rows_differ_by_what_they_use(changes: dict[str, Any], rows: set[str]) -> None:
    """A thread more changes pixels on the CPU: measured on the toy."""
    cells = (SD, TOME, XFORMERS, NATIVE, PEER)
    assert {cell.name for cell in cells if same_images(described(), described(**changes), [cell])} == rows
    assert bool(same_images(described(), described(**changes), cells)) == bool(rows)


def test_a_gpus_numbers_do_not_hang_on_threads_but_on_its_settings() -> None:
    cuda = {"runtime": "13", "cudnn": 9, "tf32": False, "driver": "580"}
    before = described(cuda=cuda)
    assert same_images(before, described(cuda={**cuda, "driver": "590"}, cpu_threads=64), [TOME]) == []
    assert same_images(before, described(cuda={**cuda, "tf32": True}), [TOME]) == ["tf32: False there, True here"]


def test_this_machine_is_itself() -> None:
    here = describe_machine(torch.device("cpu"))
    assert same_images(here, here, [SD, TOME, PEER]) == []
    assert here["packages"]["torch"]


@pytest.mark.parametrize(
    ("cell", "taken", "kernels"),
    [
        (SD, True, ["native"]),
        (PEER, True, ["native"]),
        (TOME, True, ["flash-attn"]),
        (TOME, False, ["native"]),
        (FLOAT, True, ["native"]),
        (SPREAD, True, ["native"]),
        (FLASH, False, ["flash-attn"]),
        (NATIVE, True, ["native"]),
        (XFORMERS, True, ["xformers"]),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_kernels_of_a_row(
    pipe: Any, monkeypatch: pytest.MonkeyPatch, cell: Cell, taken: bool, kernels: list[str]
) -> None:
    """`auto` is resolved for the heads, the dtype and the device of the layers that are patched."""
    first = pipe.unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    asked = []

    def takes(query: torch.Tensor) -> bool:
        asked.append((query.shape[-1], query.device))
        return taken and query.dtype == torch.bfloat16

    monkeypatch.setattr(attention, "flash_takes", takes)
    pipe.unet.to(torch.bfloat16)
    try:
        assert attention_kernels(pipe, cell) == kernels
    finally:
        pipe.unet.to(torch.float32)
    assert set(asked) <= {(first.to_q.out_features // first.heads, pipe.device)}
    assert bool(asked) == (cell in (TOME, FLOAT))
