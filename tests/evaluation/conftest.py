"""A small model, and a finished run of it, that tests of the harness share."""

from __future__ import annotations

import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from support import runs
from support import tiny_pipelines as tiny
from torch import nn

from elfatt_sd.evaluation import measure
from elfatt_sd.evaluation.protocols import Protocol
from elfatt_sd.evaluation.report.data import load_results
from elfatt_sd.evaluation.report.page import write_report
from elfatt_sd.evaluation.run import RunFolder
from elfatt_sd.evaluation.stages import evaluate


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model in `sd15`, an extractor in `clip` and a reference in `val`."""
    folder = tmp_path_factory.mktemp("evaluation")
    tiny.sd15(folder).save_pretrained(folder / "sd15")
    tiny.image_encoder().save_pretrained(folder / "clip")
    tiny.image_processor().save_pretrained(folder / "clip")
    runs.write_folder(folder / "val")
    return folder


@pytest.fixture(scope="session")
def model(workplace: Path) -> Path:
    return workplace / "sd15"


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Path, Protocol]:
    """A finished generation and its protocol."""
    place = tmp_path_factory.mktemp("made")
    protocol = runs.small_protocol(place, model)
    assert runs.make(place / "run", protocol) == {}
    return place / "run", protocol


@pytest.fixture
def protocol(tmp_path: Path, model: Path) -> Protocol:
    return runs.small_protocol(tmp_path, model)


@pytest.fixture(scope="session")
def full_protocol(workplace: Path) -> Protocol:
    """The small protocol with every stage."""
    return runs.small_protocol(workplace, workplace / "sd15", *runs.full_overrides(workplace))


@pytest.fixture(scope="session")
def finished_run(workplace: Path, full_protocol: Protocol) -> Path:
    """The folder of a finished run; memory was measured in this process in place of fresh ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ELFATT_SD_CACHE", str(workplace / "cache"))
        patch.setattr(measure, "run_worker", measure.measure_peak)
        evaluate(RunFolder(workplace / "run", full_protocol), lambda line: None, show_progress=False)
    return workplace / "run"


@pytest.fixture
def shared_cache(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache that `finished_run` has filled."""
    monkeypatch.setenv("ELFATT_SD_CACHE", str(workplace / "cache"))


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is measured in this process in place of fresh ones."""
    monkeypatch.setattr(measure, "run_worker", measure.measure_peak)


@pytest.fixture
def copy(finished_run: Path, shared_cache: None, tmp_path: Path) -> Path:
    """A copy of the finished run."""
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


@pytest.fixture(scope="session")
def inception_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real Inception network with random weights, in a file of the published file's layout."""
    fidelity = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3")

    class Unloaded(fidelity.FeatureExtractorInceptionV3):  # type: ignore[misc, name-defined]
        def load_state_dict(self, *_: Any, **__: Any) -> None:
            """Keep the random weights."""

    path: Path = tmp_path_factory.mktemp("inception") / "weights.pth"
    torch.save({}, path)
    torch.manual_seed(0)
    network = Unloaded("inception-v3-compat", ["2048"], feature_extractor_weights_path=str(path))
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_var.fill_(0.3)  # keeps activations alive through random layers
    torch.save(network.state_dict(), path)
    return path


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], runs.Page]:
    """The folder of a made-up run, its results and its page, with all plots."""
    folder = tmp_path_factory.mktemp("run")
    return folder, runs.build_run(folder), runs.Page(write_report(load_results(folder)))


@pytest.fixture
def results(run: tuple[Path, dict[str, Any], runs.Page]) -> dict[str, Any]:
    return deepcopy(run[1])


@pytest.fixture
def sweep() -> dict[str, Any]:
    return runs.build_sweep()
