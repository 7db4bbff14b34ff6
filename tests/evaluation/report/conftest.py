"""Made-up runs with their reports."""

import copy

import pytest
from support.runs import Page, build_run, build_sweep

from elfatt_sd.evaluation.report import charts, load_results, write_report


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


@pytest.fixture
def one_plot(monkeypatch):
    """One plot is drawn: for reports whose words are looked at."""
    monkeypatch.setattr(charts, "PLOTS", [charts.closeness])


@pytest.fixture(autouse=True)
def few_plots():
    """Reports have all of their plots here."""
