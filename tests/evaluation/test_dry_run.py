"""What a run would take, and everything that would stop it, before anything is made."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from elfatt_sd.evaluation import stages as dry_run
from elfatt_sd.evaluation.measure import program_of
from elfatt_sd.evaluation.metrics.base import MetricChoice
from elfatt_sd.evaluation.protocols import Protocol
from elfatt_sd.evaluation.run import Run


def test_what_is_left_to_do_is_counted(full_protocol: Protocol, finished_run: Path, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", full_protocol)
    assert dry_run.count_images(run) == 5 * 4
    assert dry_run.disk_gib(run) == pytest.approx(20 * 32 * 32 * 1.6 / 2**30)
    assert len({program_of(cell) for cell in full_protocol.cells}) == 3  # the untouched one for baseline and null row
    assert dry_run.to_do(run) == (
        "20 images of 4 steps, 2 rounds of 4 rows to time, 6 processes to measure the memory, the scores"
    )
    assert dry_run.to_do(Run(finished_run, full_protocol)) == "nothing"


def test_a_size_that_no_model_draws_is_an_obstacle(full_protocol: Protocol, tmp_path: Path) -> None:
    (told,) = dry_run.obstacles(Run(tmp_path / "run", dataclasses.replace(full_protocol, height=33)))
    assert told.startswith("height=33 is not accepted")


def test_every_obstacle_is_named_at_once(
    full_protocol: Protocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert dry_run.obstacles(Run(tmp_path / "new", full_protocol)) == []
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(Run, "free_gib", 0.0)
    wrong = dataclasses.replace(
        full_protocol,
        model="/nowhere/sd",
        extractors=("clip:/nowhere/clip", "dinov2:/nowhere/dino"),
        reference=dataclasses.replace(full_protocol.reference, source="/nowhere/val"),
        metrics=(MetricChoice("lpips", "/nowhere/alex.pth"), MetricChoice("no_module:f"), MetricChoice("cmmd")),
    )
    told = dry_run.obstacles(Run(tmp_path / "new", wrong), [tmp_path / "lost"])
    parts = ["/nowhere/sd", "/nowhere/clip", "/nowhere/dino", "/nowhere/val", "lost", "GiB of disk are needed"]
    for part in (*parts, "/nowhere/alex.pth", "no_module:f"):
        assert sum(part in line for line in told) == 1, (part, told)


def test_neighbours_need_more_images(full_protocol: Protocol, tmp_path: Path) -> None:
    few = dataclasses.replace(full_protocol, metrics=(MetricChoice("prdc"),), limit=5)
    told = dry_run.obstacles(Run(tmp_path / "new", few))
    assert told == ["metric 'prdc' needs more than 5 images and reference images; there are 5."]


def test_a_scheduler_of_other_pipelines_is_an_obstacle(full_protocol: Protocol, tmp_path: Path) -> None:
    other = dataclasses.replace(full_protocol, scheduler="FlowMatchEulerDiscreteScheduler")
    (told,) = dry_run.obstacles(Run(tmp_path / "new", other))
    assert told.startswith(f"scheduler={other.scheduler!r} does not fit the model's PNDMScheduler: it takes ")


def test_images_of_the_run_are_no_reference(full_protocol: Protocol, tmp_path: Path) -> None:
    (own := tmp_path / "run" / "cells" / "sd" / "images").mkdir(parents=True)
    given = dataclasses.replace(full_protocol.reference, source=str(own))
    told = dry_run.obstacles(Run(tmp_path / "run", dataclasses.replace(full_protocol, reference=given)))
    assert any("is of this run; give images that it is compared with" in line for line in told)


def test_metrics_of_one_name_are_an_obstacle(full_protocol: Protocol, tmp_path: Path) -> None:
    twice = dataclasses.replace(full_protocol, metrics=(MetricChoice("colorsys:rgb_to_hsv", name="x"),) * 2)
    told = dry_run.obstacles(Run(tmp_path / "new", twice))
    assert len(told) == 1
    assert "'x' twice" in told[0]
