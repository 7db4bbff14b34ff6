"""Made-up runs with their reports."""

import copy

import pytest
from support.runs import Page, build_run, build_sweep

from elfatt_sd.evaluation.report.data import load_results
from elfatt_sd.evaluation.report.page import write_report


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """The folder of a run, its results and its page, with all plots."""
    folder = tmp_path_factory.mktemp("run")
    results = build_run(folder)
    return folder, results, Page(write_report(load_results(folder)))


@pytest.fixture
def results(run):
    return copy.deepcopy(run[1])


@pytest.fixture
def sweep():
    return build_sweep()
