"""A small model, and a finished run of it, that tests of the harness share."""

from __future__ import annotations

from pathlib import Path

import pytest
import small_run

from elfatt_sd.evaluation import measure
from elfatt_sd.evaluation.protocols import Protocol
from elfatt_sd.evaluation.run import run


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model in `sd15`, an extractor in `clip` and a reference in `val`."""
    folder = tmp_path_factory.mktemp("evaluation")
    small_run.write_model(folder)
    small_run.write_clip(folder)
    small_run.write_reference(folder)
    return folder


@pytest.fixture(scope="session")
def model(workplace: Path) -> Path:
    return workplace / "sd15"


@pytest.fixture
def protocol(tmp_path: Path, model: Path) -> Protocol:
    return small_run.small_protocol(tmp_path, model)


@pytest.fixture(scope="session")
def full_protocol(workplace: Path) -> Protocol:
    """The small protocol with every stage."""
    return small_run.small_protocol(workplace, workplace / "sd15", *small_run.full_overrides(workplace))


@pytest.fixture(scope="session")
def finished_run(workplace: Path, full_protocol: Protocol) -> Path:
    """The folder of a finished run; memory was measured in this process in place of fresh ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ELFATT_SD_CACHE", str(workplace / "cache"))
        patch.setattr(measure, "run_worker", measure.measure_peaks)
        run(full_protocol, workplace / "run", lambda line: None, show_progress=False)
    return workplace / "run"
