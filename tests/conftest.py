"""Settings and fixtures for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

# Deprecations inside other packages that we cannot mend: each is named with the module that raises it.
THIRD_PARTY = (
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning:diffusers",
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning:torch",
    "ignore:__array_wrap__ must accept context:DeprecationWarning",
)


def pytest_configure(config: pytest.Config) -> None:
    for line in THIRD_PARTY:
        config.addinivalue_line("filterwarnings", line)
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for tokenizer files that all tests of the session share."""
    return tmp_path_factory.mktemp("tiny")
