"""Context parallelism of diffusers: refused in one line, before or after a patch, with nothing half-patched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import diffusers
import pytest
import torch
from support import tiny_transformers
from support.checks import Run, all_layers

import elfatt_sd
from elfatt_sd import ElfattError

REFUSED = r"Transformer\w+ cannot be patched with context parallelism .* a part of the image's tokens\. Call .*\.$"

pytestmark = pytest.mark.filterwarnings("ignore:.*all_gather_tensor.* is deprecated:FutureWarning")  # diffusers' own

if not hasattr(diffusers, "ContextParallelConfig"):
    pytest.skip("this version of diffusers has no context parallelism", allow_module_level=True)


@pytest.fixture(autouse=True)
def two_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is the first of two; the second is not there, and what it would send is not waited for."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)  # which diffusers divides by
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


def qwen_image() -> tuple[Any, Run]:
    """With a text that two processes can divide."""
    text = {"embeds": tiny_transformers.embeds(tokens=8), "embeds_mask": torch.ones(1, 8, dtype=torch.long)}
    both = {f"{which}_{name}": given for which in ("prompt", "negative_prompt") for name, given in text.items()}
    return tiny_transformers.qwen_image(**both)


@pytest.fixture(params=[tiny_transformers.wan, qwen_image], ids=lambda make: make.__name__)
def made(request: pytest.FixtureRequest) -> tuple[Any, Run]:
    make: Callable[[], tuple[Any, Run]] = request.param
    return make()


def divide(model: Any) -> None:
    model.enable_parallelism(config=diffusers.ContextParallelConfig(ulysses_degree=2))


def processors(pipe: Any) -> list[Any]:
    return [layer.attention.processor for layer in all_layers(pipe)]


def test_before_a_patch(made: tuple[Any, Run]) -> None:
    pipe, _ = made
    divide(pipe.transformer)
    before = processors(pipe)
    for call in (elfatt_sd.apply_patch, elfatt_sd.plan, lambda pipe: elfatt_sd.patched(pipe).__enter__()):
        with pytest.raises(ElfattError, match=REFUSED):
            call(pipe)
    assert not elfatt_sd.is_patched(pipe)
    assert processors(pipe) == before
    elfatt_sd.apply_patch(pipe, "sd")  # untouched


def test_after_a_patch(made: tuple[Any, Run]) -> None:
    """Refused in the first call, although its step is an exact one; without the patch, diffusers divides the tokens."""
    pipe, run = made
    before, whole = processors(pipe), run()
    late = elfatt_sd.PatchConfig("late", (elfatt_sd.Phase(0.9), elfatt_sd.Phase(1.0, "cell_spread", block_size=8)))
    elfatt_sd.apply_patch(pipe, late)
    divide(pipe.transformer)
    for _ in range(2):
        with pytest.raises(ElfattError, match=REFUSED):
            run()
    elfatt_sd.remove_patch(pipe)
    assert processors(pipe) == before
    assert all(processor._parallel_config is not None for processor in before)
    assert run().shape == whole.shape
    with pytest.raises(ElfattError, match=REFUSED):
        elfatt_sd.apply_patch(pipe, late)
