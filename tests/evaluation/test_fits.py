"""Batches that no memory holds are refused before anything is drawn: those of images, of timing and of memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from elfatt_sd.evaluation import dry_run
from elfatt_sd.evaluation.fits import check_batches_fit, misfits
from elfatt_sd.evaluation.images import load_protocol_pipeline
from elfatt_sd.evaluation.protocols import Memory, Protocol, Time
from elfatt_sd.evaluation.run import Run

HUGE = 1_000_000


@pytest.fixture
def huge(full_protocol: Protocol) -> Protocol:
    return dataclasses.replace(full_protocol, time=Time(batch=HUGE), memory=Memory((1, 2, 2 * HUGE)))


def test_batches_of_timing_and_memory_are_refused_too(huge: Protocol, tmp_path: Path) -> None:
    """By what the directory tells, and by the pipeline; each with the setting to change."""
    loaded = load_protocol_pipeline(huge)
    for told in (misfits(huge), misfits(huge, loaded), dry_run.obstacles(Run(tmp_path / "run", huge))):
        assert [line.split(" at ")[0] for line in told] == [
            f"time.batch={HUGE}: a batch of {HUGE}", f"memory.batches={2 * HUGE}: a batch of {2 * HUGE}"
        ]  # fmt: skip
        assert all(line.endswith("or try with --force.") for line in told)
    assert dry_run.obstacles(Run(tmp_path / "run", huge), force=True) == []


def test_batches_that_fit_are_taken(full_protocol: Protocol) -> None:
    pipe = load_protocol_pipeline(full_protocol)
    check_batches_fit(full_protocol)
    check_batches_fit(full_protocol, pipe)


def test_a_size_that_no_model_draws_is_named_once(huge: Protocol) -> None:
    odd = dataclasses.replace(huge, height=33)
    assert len(misfits(odd)) == 1
    assert misfits(odd)[0].startswith("height=33 is not accepted")
