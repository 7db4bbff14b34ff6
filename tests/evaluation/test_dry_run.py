"""What a run would take, and everything that would stop it, before anything is made."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elfatt_sd.evaluation import dry_run, generate, score
from elfatt_sd.evaluation.memory import program_of
from elfatt_sd.evaluation.metrics.choice import MetricChoice
from elfatt_sd.evaluation.protocols import Protocol
from elfatt_sd.evaluation.run import Run


def test_the_estimate_counts_images_and_extrapolates_steps(
    full_protocol: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run, "timed_call", _three_calls)
    found = dry_run.estimate(Run(Path("nowhere"), full_protocol))
    assert dry_run.count_images(Run(Path("nowhere"), full_protocol)) == 5 * 4
    assert dry_run.disk_gib(Run(Path("nowhere"), full_protocol)) == pytest.approx(20 * 32 * 32 * 1.6 / 2**30)
    assert found.seconds_per_image == pytest.approx(1.0 + 5 * 0.5)  # 4 steps of PLMS are 5 calls
    assert found.generation_hours == pytest.approx(20 * 3.5 / 3600)
    assert found.timing_hours == pytest.approx(4 * (2 + 1) * 1 * 3.5 / 3600)  # a warm-up has all four steps
    memory = full_protocol.memory
    assert memory is not None
    weighed = sum(memory.batches) * (memory.steps or 4) / 4
    programs = len({program_of(cell) for cell in full_protocol.cells})
    assert programs == 3  # the untouched one for baseline and null row
    least = programs * weighed * 3.5 / 3600
    assert least < found.memory_hours  # each process has to start
    assert found.memory_hours < least + 0.2


def test_the_estimate_leaves_out_what_is_done(
    full_protocol: Protocol, finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run, "probe_seconds", lambda _: 3.5)
    found = dry_run.estimate(Run(finished_run, full_protocol))
    assert (found.generation_hours, found.timing_hours, found.memory_hours, found.scoring_hours) == (0, 0, 0, 0)


def test_the_estimate_counts_features_and_processes(full_protocol: Protocol, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "probe_seconds", lambda _: 3.5)
    looked: list[int] = []
    counted = score.reference_left

    def left(protocol: Protocol, extractor: Any) -> int:
        looked.append(counted(protocol, extractor))
        return 10**9  # at a nanosecond each, a second

    monkeypatch.setattr(score, "reference_left", left)
    alone = dry_run.estimate(Run(Path("nowhere"), full_protocol))
    assert all(0 <= count <= full_protocol.reference.count for count in looked)
    assert len(looked) == len(full_protocol.extractors)
    assert alone.scoring_hours > 1 / 3600
    monkeypatch.setattr(dry_run, "process_state", lambda _: SimpleNamespace(num_processes=4))
    shared = dry_run.estimate(Run(Path("nowhere"), full_protocol))
    assert shared.generation_hours == pytest.approx(alone.generation_hours / 4)
    assert shared.processes == 4


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


def test_the_estimate_counts_the_calls_of_schedulers_with_two_in_a_step(
    full_protocol: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heun's takes one in its last step: 3 calls of 2 steps, 7 of 4."""
    heun = dataclasses.replace(full_protocol, scheduler="HeunDiscreteScheduler")
    monkeypatch.setattr(dry_run, "timed_call", _three_calls)
    assert dry_run.probe_seconds(heun) == pytest.approx(1.0 + 7 * 0.5)


def _three_calls(pipe: Any, protocol: Protocol, cell: Any, prompts: list[str], seeds: list[int]) -> dict[str, float]:
    calls: list[int] = []
    handle = pipe.unet.register_forward_hook(lambda *_: calls.append(1))
    generate.make_images(pipe, protocol, prompts, seeds)
    handle.remove()
    assert len(calls) == 3  # two steps of PLMS, or of Heun's
    return {"end_to_end": 2.5 * len(prompts), "unet": 1.5 * len(prompts)}
