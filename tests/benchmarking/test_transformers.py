"""A transformer's call is timed like a UNet's: untouched, the methods that go there, and their floor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import tiny_transformers
from support.checks import Work

from elfatt_sd import ElfattError, PatchConfig
from elfatt_sd.benchmarking.models import Model, make_pipeline, unet_call
from elfatt_sd.benchmarking.unet import unet
from elfatt_sd.benchmarking.variants import FLOOR, Variant
from elfatt_sd.families import copy_structure


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(tiny_transformers.flux_transformer(), 8)


def test_rows(model: Model) -> None:
    found: Any = unet(model, sizes=(64,), repeats=1, memory=(1,), batch=1, device="cpu")
    rows = {row["method"]: row for row in found["rows"]}
    assert {"untouched", "agent", "elfatt", "elfatt-fast", "elfatt-quality"} <= set(rows)
    assert not {"tome", "tomesd"} & set(rows), "nothing is merged where positions are rotary"


def test_an_image_that_is_no_square(model: Model) -> None:
    found: Any = unet(model, sizes=("96x64",), methods=["elfatt-fast"], repeats=1, memory=(), batch=1, device="cpu")
    assert {row["size"] for row in found["rows"]} == {"96x64"}
    assert model.inputs("96x64", 1)["hidden_states"].shape[1] == model.inputs(64, 1)["hidden_states"].shape[1] * 3 // 2
    ids = model.inputs("96x64", 1)["img_ids"]
    assert [int(ids[:, axis].max()) + 1 for axis in (1, 2)] == [4, 6], "rows, columns: the width is said first"


def test_a_named_method_that_does_not_go_there_is_refused(model: Model) -> None:
    with pytest.raises(ElfattError, match="rotary positions"):
        unet(model, sizes=(64,), methods=["tome"], repeats=1, device="cpu")
    with pytest.raises(ElfattError, match=r"model='flux' has no pipeline here"):
        make_pipeline("flux", torch.device("cpu"), torch.float32, 1)


def test_the_floor_attends_to_nothing(model: Model) -> None:
    inputs = model.inputs(64, 1)
    work = {}
    for kind in ("untouched", FLOOR):
        call = unet_call(Variant(kind, PatchConfig("all")).install(copy_structure(model.unet)), inputs)
        with Work() as work[kind]:
            call()
    assert (work["untouched"].calls, work[FLOOR].calls) == (2, 0)
