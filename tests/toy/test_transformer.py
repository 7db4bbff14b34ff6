"""The weights of the embedded transformer: a plain diffusers directory that draws what it is asked for."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline

import elfatt_sd
from elfatt_sd.families import find_layers
from elfatt_sd.toy import EMBEDDED
from elfatt_sd.toy.features import load_feature_extractor
from elfatt_sd.toy.renderer import class_labels, describe
from tools.toy import quality

TRANSFORMER = EMBEDDED["toy-dit"]


@pytest.fixture(scope="module")
def pipeline() -> Any:
    return elfatt_sd.load_pipeline("toy-dit", device="cpu")


def test_both_pipelines_are_small() -> None:
    folders = [embedded.folder for embedded in EMBEDDED.values()]
    sizes = [path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert sum(sizes) <= 24_000_000


def test_it_is_a_standard_directory_without_pickles(pipeline: Any) -> None:
    index = json.loads((TRANSFORMER.folder / "model_index.json").read_text())
    assert index["_class_name"] == "FluxPipeline"
    assert not [path for path in TRANSFORMER.folder.rglob("*") if path.suffix in {".bin", ".pt", ".ckpt", ".pkl"}]
    plain: Any = FluxPipeline.from_pretrained(TRANSFORMER.folder)
    assert type(pipeline) is type(plain)


def test_the_grid_has_4096_tokens(pipeline: Any) -> None:
    plan = elfatt_sd.plan(pipeline, "elfatt-fast")
    assert {layer.tokens for layer in plan.layers} == {4096}
    assert len(plan.layers) == len(find_layers(pipeline.transformer)) == 7


def test_images_show_what_was_asked_for(pipeline: Any) -> None:
    classes = quality.draw_classes(2, 1)
    prompts = [describe(*labels) for labels in classes]
    made = quality.generate(pipeline, prompts, 0, 1, num_inference_steps=10, guidance_scale=1.0)
    images = quality.shrink(torch.cat(list(made)))
    hits = quality.predicted(load_feature_extractor(), images) == class_labels(classes)
    assert hits.double().mean() >= 0.75
