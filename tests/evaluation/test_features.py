"""Extractors: the real networks with random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation import features
from elfatt_sd.evaluation.features import Extractor, ToyExtractor, load_extractor
from elfatt_sd.files import sha256_of_file
from elfatt_sd.toy.features import load_feature_extractor

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
WAYS = ("inception", "inception:torch-fidelity", "inception:pytorch-fid", "inception:clean-fid")


def pictures(count: int, height: int = 64, width: int = 64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8, generator=generator)


def inception(way: str, file: Path) -> Extractor:
    return load_extractor(way, weights=file, sha256=sha256_of_file(file))


def test_inception_resizes_as_tensorflow_did(inception_file: Path) -> None:
    """The published statistics need TensorFlow 1's resizing; torchmetrics' own default has antialiasing."""
    fidelity = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3")
    extractor = inception("inception", inception_file)
    original = fidelity.FeatureExtractorInceptionV3("inception-v3-compat", ["2048"], str(inception_file))
    images = pictures(2, 320, 400)
    found = extractor(images)
    assert (found.shape, found.dtype, extractor.dimension) == ((2, 2048), torch.float32, 2048)
    torch.testing.assert_close(found, original(images)[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1:2], extractor(images[1:2]), rtol=1e-4, atol=1e-5)


def test_only_the_published_weights_give_fid(inception_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of the network's own size are not resized, so all ways differ by the scale of their values alone."""
    digest = sha256_of_file(inception_file)
    other = inception("inception", inception_file)
    assert (other.distance_name, other.kernel_name) == (f"FD-Inception-{digest[:8]}", f"KD-Inception-{digest[:8]}")
    assert features.INCEPTION_SHA256.startswith("6726825d")
    monkeypatch.setattr(features, "INCEPTION_SHA256", digest)
    found = [load_extractor(way, weights=inception_file) for way in WAYS]
    assert [each.distance_name for each in found] == ["FID", "FID", "FID (pytorch-fid)", "FID (clean-fid)"]
    assert [each.kernel_name for each in found] == ["KID", "KID", "KID (pytorch-fid)", "KID (clean-fid)"]
    assert len({each.identity for each in found}) == 3
    plain, same, *others = (each(pictures(1, 96, 120)) for each in found)
    assert torch.equal(plain, same)
    assert not any(torch.allclose(plain, other, rtol=1e-3) for other in others)
    whole, _, other_scale, clean = (each(pictures(1, 299, 299)) for each in found)
    torch.testing.assert_close(clean, whole, rtol=1e-4, atol=1e-5)
    assert (other_scale - whole).abs().max() < 0.1 * whole.abs().max()


@pytest.mark.parametrize("size", [(64, 80), (512, 512), (300, 299)])
def test_pytorch_fid_and_clean_fid_give_the_same_features(inception_file: Path, size: tuple[int, int]) -> None:
    package = pytest.importorskip("pytorch_fid.inception", reason="pip install --no-deps pytorch-fid clean-fid")
    clean = pytest.importorskip("cleanfid.resize", reason="pip install --no-deps clean-fid")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(package, "load_state_dict_from_url", lambda *_, **__: torch.load(inception_file))
        network = package.InceptionV3([3]).eval()
    images = pictures(1, *size)
    with torch.no_grad():
        wanted = network(images / 255)[0].flatten(1)
    torch.testing.assert_close(inception("inception:pytorch-fid", inception_file)(images), wanted, rtol=1e-4, atol=1e-5)
    resized = torch.from_numpy(clean.build_resizer("clean")(images[0].permute(1, 2, 0).numpy())).permute(2, 0, 1)
    # of 255: torch weighs in single precision
    torch.testing.assert_close(features.resized(images, (299, 299))[0], resized, rtol=0, atol=1e-2)
    extractor, pixels = inception("inception:clean-fid", inception_file), (resized[None] - 128) / 128
    with torch.no_grad():
        for name, layer in extractor.network.named_children():
            pixels = pixels if name == "fc" else layer(pixels)
    torch.testing.assert_close(extractor(images), pixels.flatten(1), rtol=1e-3, atol=1e-4)


def test_toy_features_and_attributes() -> None:
    extractor, images = load_extractor("toy"), pictures(2, 256, 256)
    assert isinstance(extractor, ToyExtractor)
    found = extractor(images)
    assert (found.shape, extractor.distance_name) == ((2, extractor.dimension), "FD-toy")
    seen, expected = extractor.classify(found), load_feature_extractor().classify(images)
    assert list(seen) == list(expected) == ["shape", "color", "pattern", "background"]
    assert all(torch.equal(seen[name], expected[name]) for name in expected)
    flat, large = (torch.full((1, 3, side, side), 90, dtype=torch.uint8) for side in (128, 256))
    torch.testing.assert_close(extractor(flat), extractor(large), rtol=1e-4, atol=1e-5)
    for weight in extractor.network.parameters():  # a reference would be damaged each time that it is computed
        weight.fill_(float("nan"))
    with pytest.raises(ElfattError, match=r"extractor toy gives NaN, or numbers of 1e\+15 and more"):
        extractor(images)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories of models: a `clip` with its text part; `cut`, without the projection; `dinov2`."""
    from transformers import CLIPConfig, CLIPModel, CLIPVisionConfig, CLIPVisionModel, Dinov2Config, Dinov2Model

    made: Path = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    vision = {**SIZES, "image_size": 32, "patch_size": 8}
    # the projection has another size than the picture part's own settings say, as some are published
    whole = CLIPConfig(text_config={**SIZES, "vocab_size": 50}, vision_config=vision, projection_dim=24)
    CLIPModel(whole).save_pretrained(made / "clip")
    CLIPVisionModel(CLIPVisionConfig(**vision)).save_pretrained(made / "cut")
    config = Dinov2Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14)
    Dinov2Model(config).save_pretrained(made / "dinov2")
    return made


def test_clip_directory(folder: Path) -> None:
    extractor = load_extractor(f"clip:{folder / 'clip'}")
    model = "CLIP (ViT of width 32/8@32)"
    assert (extractor.distance_name, extractor.kernel_name, extractor.dimension) == (f"FD-{model}", f"KD-{model}", 24)
    images = pictures(3, 48, 80)
    found = extractor(images)
    assert found.shape == (3, 24)
    torch.testing.assert_close(found[:1], extractor(images[:1]), rtol=1e-4, atol=1e-5)
    images[:, :, :, :10] = 0  # only the centre of the wide picture is seen
    torch.testing.assert_close(extractor(images), found)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        surrounded = extractor(images)
    assert torch.equal(surrounded, extractor(images)), "float32, whatever surrounds it"


def test_preprocessing_of_the_directory_is_used_and_hashed(folder: Path, tmp_path: Path) -> None:
    plain = load_extractor(f"dinov2:{folder / 'dinov2'}")
    assert (plain.distance_name, plain.dimension) == ("FD-DINOv2 (ViT of width 32/14@28)", 32)
    images = pictures(2, 56, 112)
    dark = images.clone()
    dark[..., :16] = 0
    assert not torch.equal(plain(images), plain(dark)), "the whole picture is seen"
    stored = {"size": {"shortest_edge": 32}, "crop_size": {"height": 28, "width": 28}, "image_mean": [0.5, 0.5, 0.5]}
    shutil.copytree(folder / "dinov2", tmp_path / "other")
    (tmp_path / "other" / "preprocessor_config.json").write_text(json.dumps(stored))
    other = load_extractor(f"dinov2:{tmp_path / 'other'}")
    assert (other.preprocessing["shortest_edge"], other.preprocessing["crop"]) == (32, 28)
    assert other.identity != plain.identity
    assert not torch.allclose(other(images), plain(images), atol=1e-3)


def test_other_models_weights_and_extractors_are_refused(folder: Path, inception_file: Path, tmp_path: Path) -> None:
    """Transformers would fill what is missing with random numbers, and a pickle could run any code."""
    cases = [
        ("resnet", "accepted: inception, inception:pytorch-fid, .*dinov2:DIR"),
        ("clip:", "accepted: inception"),
        ("dinov2:/nowhere", "no config.json"),
        (f"clip:{folder / 'dinov2'}", "is of type dinov2; accepted: clip"),
        (f"dinov2:{folder / 'clip'}", "is of type clip; accepted: dinov2"),
        (f"clip:{folder / 'cut'}", r"lacks 1 of its weights, first visual_projection\.weight"),
    ]
    for spec, reason in cases:
        with pytest.raises(ElfattError, match=reason):
            load_extractor(spec)
    for name, content in (("empty", {"a": torch.zeros(1)}), ("pickled", Path("."))):
        torch.save(content, tmp_path / f"{name}.pth")
    files = [
        (inception_file, None, f"accepted is {features.INCEPTION_SHA256}"),
        (tmp_path / "none.pth", None, "do not exist"),
        (tmp_path / "empty.pth", "own", "do not fit the network"),
        (tmp_path / "pickled.pth", "own", "do not fit the network .*Weights only load failed"),
    ]
    for path, digest, reason in files:
        with pytest.raises(ElfattError, match=reason):
            load_extractor("inception", weights=path, sha256=digest and sha256_of_file(path))


def test_odd_preprocessing_is_told(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "clip", tmp_path / "model")
    wrong: tuple[dict[str, Any], ...] = (
        {"crop_size": "x"},
        {"crop_size": -1},
        {"size": {"height": 10**9}},
        {"size": 10_000},
        {"image_mean": [1]},
        {"image_std": [0, 1, 1]},
        {"crop_size": 8},  # CLIP takes images of its own size alone
    )
    for text in ("{", *map(json.dumps, wrong)):
        (tmp_path / "model" / "preprocessor_config.json").write_text(text)
        with pytest.raises(ElfattError, match=r"preprocessor_config\.json"):
            load_extractor(f"clip:{tmp_path / 'model'}")
