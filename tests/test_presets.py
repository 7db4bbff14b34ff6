"""What each preset does to the toy's pictures, held within a band: a change of method or weights shows here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import elfatt_sd
from elfatt_sd.config import METHODS
from elfatt_sd.toy import quality
from elfatt_sd.toy.features import load_feature_extractor
from elfatt_sd.toy.models import GUIDANCE

COUNT, STEPS = 8, 10
# Of these 8 pictures: PSNR to the untouched ones in dB, `FD-toy` to 256 renders, share of attributes that are right.
PINNED = {
    "sd": (float("inf"), 472.7, 0.969),
    "tome": (29.6, 474.8, 0.969),
    "agent": (31.9, 472.0, 0.969),
    "elfatt": (27.1, 474.7, 0.969),
    "elfatt-fast": (34.4, 479.8, 0.969),
    "elfatt-quality": (41.7, 473.1, 0.969),
}


@pytest.fixture(scope="module")
def pipeline() -> Any:
    return elfatt_sd.load_pipeline("toy", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def untouched(pipeline: Any) -> Tensor:
    return pictures(pipeline)


@pytest.fixture(scope="module")
def reference() -> Tensor:
    classifier = load_feature_extractor()
    return torch.cat([classifier(part) for part in quality.renders(256, quality.REFERENCE_SEED, 256)])


def classes() -> list[tuple[str, str, str, str]]:
    return quality.draw_classes(COUNT, 3)


def pictures(pipeline: Any) -> Tensor:
    prompts = [quality.describe(*labels) for labels in classes()]
    return torch.cat(
        list(quality.generate(pipeline, prompts, 40, 4, num_inference_steps=STEPS, guidance_scale=GUIDANCE))
    )


def test_every_preset_is_pinned() -> None:
    assert set(PINNED) == set(METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_pictures_stay_as_they_were_measured(pipeline: Any, untouched: Tensor, reference: Tensor, method: str) -> None:
    psnr, distance, accuracy = PINNED[method]
    classifier = load_feature_extractor()
    with elfatt_sd.patched(pipeline, method):
        made = pictures(pipeline)
    error = (made.double() - untouched.double()).square().mean()
    hits = quality.predicted(classifier, made) == quality.class_labels(classes())
    assert (10 * torch.log10(255**2 / error)).item() == pytest.approx(psnr, abs=1.5)
    assert quality.distance(classifier(made), reference) == pytest.approx(distance, rel=0.05)
    assert hits.double().mean().item() == pytest.approx(accuracy, abs=0.07)
