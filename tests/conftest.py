"""Settings and fixtures for all tests."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.utils import logging as diffusers_logging
from support import tiny_pipelines as tiny
from transformers.utils import logging as transformers_logging

import elfatt_sd
from elfatt_sd import methods

# Deprecations inside other packages that we cannot mend: each is named with the module that raises it.
THIRD_PARTY = (
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning:diffusers",
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning:torch",
    "ignore:__array_wrap__ must accept context:DeprecationWarning",
)

# What a preset gains depends on the size, and the models of tests are tiny; `test_plans` looks at the warning.
TINY = "ignore:.* is expected to be slower than untouched:UserWarning"

SOMEONES_OWN = """
from dataclasses import dataclass
from typing import ClassVar
from elfatt_sd.methods import Attention

@dataclass(frozen=True)
class Values(Attention):
    name: ClassVar[str] = "values"
    factor: float = 1.0

    def attend(self, layer, tokens, prepared):
        return layer.project(tokens)[2] * self.factor

    def cost(self, size):
        return size.projections(size.tokens, size.tokens)
"""


def pytest_configure(config: pytest.Config) -> None:
    for line in (*THIRD_PARTY, TINY):
        config.addinivalue_line("filterwarnings", line)
    torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Let collections of garbage pass over what was imported: half a second each, and every peak of memory has some."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def every_kernel() -> None:
    """Which fused kernels PyTorch may take is one for the process, and a test of threads can leave it changed."""
    for enable in ("flash", "mem_efficient", "math"):
        getattr(torch.backends.cuda, f"enable_{enable}_sdp")(True)


@pytest.fixture(scope="module")
def shared_pipe(folder: Path) -> Any:
    """Stable Diffusion 1.5 in miniature, one for the tests of a file; see `pipe`."""
    return tiny.sd15(folder)


@pytest.fixture
def pipe(shared_pipe: Any) -> Iterator[Any]:
    """Stable Diffusion 1.5 in miniature, with its own scheduler and no patch, before every test."""
    scheduler = shared_pipe.scheduler
    yield shared_pipe
    elfatt_sd.remove_patch(shared_pipe)
    shared_pipe.scheduler = scheduler


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("ELFATT_SD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def library_chatter() -> Iterator[None]:
    """The command line silences libraries for its process; other tests get their messages back."""
    levels = [(module, module.get_verbosity()) for module in (diffusers_logging, transformers_logging)]
    yield
    for module, level in levels:
        module.set_verbosity(level)
        module.enable_progress_bar()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for tokenizer files that all tests of the session share."""
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An attention in a module of somebody else's."""
    (tmp_path / "someones_own.py").write_text(SOMEONES_OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "someones_own", raising=False)
    monkeypatch.setattr(methods, "_known", dict(methods._known))
    return "someones_own:Values"
