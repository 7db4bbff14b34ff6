"""Made-up runs with their reports, whose plots are all drawn once."""

import copy

import pytest
from support.runs import Page, build_run, build_sweep

from elfatt_sd.evaluation.report import charts, load_results, write_report
from elfatt_sd.evaluation.report.charts import Palette, draw_plots
from elfatt_sd.evaluation.report.data import Results


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    results = build_run(folder)
    return folder, results, Page(write_report(load_results(folder)))


@pytest.fixture
def results(run):
    return copy.deepcopy(run[1])


@pytest.fixture(scope="session")
def sweep_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    return folder, build_sweep(folder)


@pytest.fixture
def sweep(sweep_run):
    return copy.deepcopy(sweep_run[1])


@pytest.fixture(scope="session")
def plots_of(run, sweep_run):
    """The plots of both runs by their names."""
    shown = {"run": Results(run[1]), "sweep": Results(sweep_run[1])}
    return {name: {plot.name: plot for plot in draw_plots(each, Palette(each))[0]} for name, each in shown.items()}


@pytest.fixture
def one_plot(monkeypatch):
    """One plot is drawn: for reports whose words are looked at."""
    monkeypatch.setattr(charts, "_makers", lambda results: [charts.closeness])


@pytest.fixture(scope="module", autouse=True)
def few_plots():
    """Reports have all of their plots here."""
