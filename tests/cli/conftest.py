"""A model for the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import tiny_pipelines as tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stable Diffusion 1.5 in miniature, as a directory."""
    folder = tmp_path_factory.mktemp("model")
    tiny.sd15(folder / "parts").save_pretrained(folder / "tiny")
    return folder / "tiny"
