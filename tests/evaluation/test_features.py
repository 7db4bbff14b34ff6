"""Extractors: the real networks with random weights."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation import features
from elfatt_sd.evaluation.features import Extractor, ToyExtractor, load_extractor
from elfatt_sd.files import sha256_of_file


def pictures(count: int, height: int = 64, width: int = 64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8, generator=generator)


def test_inception_through_the_real_network(inception_file: Path) -> None:
    digest = sha256_of_file(inception_file)
    extractor = load_extractor("inception", weights=inception_file, sha256=digest)
    images = pictures(3)
    found = extractor(images)
    assert (found.shape, found.dtype, extractor.dimension) == ((3, 2048), torch.float32, 2048)
    assert found.std(0).max() > 0
    torch.testing.assert_close(found[1:2], extractor(images[1:2]), rtol=1e-4, atol=1e-5)


def test_inception_resizes_as_tensorflow_did(inception_file: Path) -> None:
    """The published statistics need TensorFlow 1's resizing; torchmetrics' own default has antialiasing."""
    fidelity = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3")
    extractor = load_extractor("inception", weights=inception_file, sha256=sha256_of_file(inception_file))
    original = fidelity.FeatureExtractorInceptionV3("inception-v3-compat", ["2048"], str(inception_file))
    images = pictures(1, 320, 400)
    torch.testing.assert_close(extractor(images), original(images)[0], rtol=1e-4, atol=1e-5)
    extractor.network.use_antialias = True  # type: ignore[assignment]
    assert not torch.allclose(extractor(images), original(images)[0], rtol=1e-2, atol=1e-3)


def test_only_the_published_weights_give_fid(inception_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = sha256_of_file(inception_file)
    other = load_extractor("inception", weights=inception_file, sha256=digest)
    assert other.distance_name == f"FD-Inception-{digest[:8]}"
    assert other.kernel_name == f"KD-Inception-{digest[:8]}"
    assert features.INCEPTION_SHA256.startswith("6726825d")
    monkeypatch.setattr(features, "INCEPTION_SHA256", digest)
    published = load_extractor("inception", weights=inception_file)
    assert (published.distance_name, published.kernel_name) == ("FID", "KID")


def test_wrong_inception_weights(inception_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ElfattError, match=f"accepted is {features.INCEPTION_SHA256}"):
        load_extractor("inception", weights=inception_file)
    with pytest.raises(ElfattError, match="do not exist"):
        load_extractor("inception", weights=tmp_path / "none.pth")
    empty, pickled = tmp_path / "empty.pth", tmp_path / "pickled.pth"
    torch.save({"a": torch.zeros(1)}, empty)
    torch.save(Path("."), pickled)
    for path, reason in ((empty, "do not fit"), (pickled, "not a file of tensors")):
        with pytest.raises(ElfattError, match=reason):
            load_extractor("inception", weights=path, sha256=sha256_of_file(path))


@pytest.fixture
def toy_extractor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyExtractor:
    from elfatt_sd.toy import features as toy

    torch.manual_seed(0)
    path = tmp_path / "classifier.safetensors"
    save_file(toy.ToyClassifier().state_dict(), path)
    monkeypatch.setattr(toy, "CLASSIFIER_FILE", path)
    extractor = load_extractor("toy")
    assert isinstance(extractor, ToyExtractor)
    return extractor


def test_toy_features_and_attributes(toy_extractor: ToyExtractor) -> None:
    images = pictures(2, 256, 256)
    found = toy_extractor(images)
    assert found.shape == (2, toy_extractor.dimension) == (2, 64)
    assert toy_extractor.distance_name == "FD-toy"
    seen = toy_extractor.classify(found)
    expected: dict[str, Tensor] = toy_extractor.network.classify(images)  # type: ignore[operator]
    assert list(seen) == ["shape", "color", "pattern", "background"]
    assert all(torch.equal(seen[name], expected[name]) for name in expected)
    torch.testing.assert_close(toy_extractor(images[:1]), found[:1], rtol=1e-4, atol=1e-5)


def test_toy_pictures_of_another_size_are_brought_to_256(toy_extractor: ToyExtractor) -> None:
    flat = torch.full((1, 3, 128, 128), 90, dtype=torch.uint8)
    large = torch.full((1, 3, 256, 256), 90, dtype=torch.uint8)
    torch.testing.assert_close(toy_extractor(flat), toy_extractor(large), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    folder: Path = tmp_path_factory.mktemp("clip")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPVisionConfig(**sizes, image_size=32, patch_size=8, projection_dim=24)
    CLIPVisionModelWithProjection(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def dinov2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Dinov2Config, Dinov2Model

    folder: Path = tmp_path_factory.mktemp("dinov2")
    torch.manual_seed(0)
    config = Dinov2Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14)
    Dinov2Model(config).save_pretrained(folder)
    return folder


def test_clip_directory(clip_folder: Path) -> None:
    extractor = load_extractor(f"clip:{clip_folder}")
    model = "CLIP (ViT of width 32/8@32)"
    assert (extractor.distance_name, extractor.kernel_name, extractor.dimension) == (f"FD-{model}", f"KD-{model}", 24)
    images = pictures(3, 48, 80)
    found = extractor(images)
    assert found.shape == (3, 24)
    torch.testing.assert_close(found[:1], extractor(images[:1]), rtol=1e-4, atol=1e-5)
    # only the centre of the wide picture is seen
    images[:, :, :, :10] = 0
    torch.testing.assert_close(extractor(images), found)


def test_preprocessing_of_the_directory_is_used_and_hashed(dinov2_folder: Path) -> None:
    plain = load_extractor(f"dinov2:{dinov2_folder}")
    assert (plain.distance_name, plain.dimension) == ("FD-DINOv2 (ViT of width 32/14@28)", 32)
    images = pictures(2, 56, 56)
    stored = {"size": {"shortest_edge": 32}, "crop_size": {"height": 28, "width": 28}, "image_mean": [0.5, 0.5, 0.5]}
    path = dinov2_folder / "preprocessor_config.json"
    path.write_text(json.dumps(stored))
    other = load_extractor(f"dinov2:{dinov2_folder}")
    path.unlink()
    assert (other.preprocessing["shortest_edge"], other.preprocessing["crop"]) == (32, 28)
    assert other.identity != plain.identity
    assert not torch.allclose(other(images), plain(images), atol=1e-3)


def test_features_are_float32_whatever_surrounds_them(clip_folder: Path) -> None:
    extractor = load_extractor(f"clip:{clip_folder}")
    images = pictures(2, 32, 32)
    expected = extractor(images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = extractor(images)
    assert torch.equal(found, expected)


def test_the_whole_clip_model_is_accepted(tmp_path: Path) -> None:
    """With text and a projection of another size than the picture part's own settings say, as some are published."""
    from transformers import CLIPConfig, CLIPModel

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text, vision = {**sizes, "vocab_size": 50}, {**sizes, "image_size": 32, "patch_size": 8}
    torch.manual_seed(0)
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)).eval()
    model.save_pretrained(tmp_path)
    extractor = load_extractor(f"clip:{tmp_path}")
    assert extractor.dimension == 24
    projection: Tensor = extractor.network.visual_projection.weight  # type: ignore[union-attr, assignment]
    assert torch.equal(projection, model.visual_projection.weight)


def test_directories_of_another_model_are_refused(clip_folder: Path, dinov2_folder: Path, tmp_path: Path) -> None:
    """Transformers would fill what is missing with random numbers."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=32, patch_size=8)).save_pretrained(tmp_path / "unprojected")
    shutil.copytree(dinov2_folder, tmp_path / "damaged")
    (tmp_path / "damaged" / "preprocessor_config.json").write_text("{")
    cases = (
        ("clip", dinov2_folder, "is of type dinov2; accepted: clip"),
        ("dinov2", clip_folder, "is of type clip_vision_model; accepted: dinov2"),
        ("clip", tmp_path / "unprojected", r"lacks 1 of its weights, first visual_projection\.weight"),
        ("dinov2", tmp_path / "damaged", r"preprocessor_config\.json is damaged"),
    )
    for kind, folder, reason in cases:
        with pytest.raises(ElfattError, match=rf"^(extractor {kind}:)?{folder}.* ?{reason}"):
            load_extractor(f"{kind}:{folder}")


@pytest.mark.parametrize("spec", ["resnet", "clip:", "clip", "dinov2:/nowhere"])
def test_unknown_extractors(spec: str) -> None:
    with pytest.raises(ElfattError, match=r"accepted: inception, inception:pytorch-fid, .*dinov2:DIR|no config.json"):
        load_extractor(spec)


def test_wrong_pictures() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, images: Tensor) -> Tensor:
            return images.float().mean((2, 3)) * self.scale

    extractor = Extractor("mean", "FD-mean", 3, Mean(), {})
    assert extractor(pictures(2)).shape == (2, 3)
    for wrong in (pictures(2).float(), pictures(2)[:, :1], pictures(2)[0]):
        with pytest.raises(ElfattError, match="accepted is uint8"):
            extractor(wrong)


def inception(way: str, file: Path) -> Extractor:
    return load_extractor(way, weights=file, sha256=sha256_of_file(file))


def test_the_ways_into_inception_have_names_of_their_own(inception_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "INCEPTION_SHA256", sha256_of_file(inception_file))
    found = [
        inception(f"inception{way}", inception_file) for way in ("", ":torch-fidelity", ":pytorch-fid", ":clean-fid")
    ]
    assert [each.distance_name for each in found] == ["FID", "FID", "FID (pytorch-fid)", "FID (clean-fid)"]
    assert [each.kernel_name for each in found] == ["KID", "KID", "KID (pytorch-fid)", "KID (clean-fid)"]
    assert len({each.identity for each in found}) == 3
    images = pictures(1, 96, 120)
    plain, same, *others = (each(images) for each in found)
    assert torch.equal(plain, same)
    assert not any(torch.allclose(plain, other, rtol=1e-3) for other in others)


def test_layers_in_turn_are_the_whole_network(inception_file: Path) -> None:
    """Pictures of the network's own size are not resized, so all ways differ by the scale of their values alone."""
    images = pictures(1, 299, 299)
    ways = ("inception", "inception:clean-fid", "inception:pytorch-fid")
    whole, clean, other = (inception(way, inception_file)(images) for way in ways)
    torch.testing.assert_close(clean, whole, rtol=1e-4, atol=1e-5)
    assert (other - whole).abs().max() < 0.1 * whole.abs().max()


@pytest.mark.parametrize("size", [(64, 80), (512, 512), (300, 299)])
def test_pytorch_fid_gives_the_same_features(inception_file: Path, size: tuple[int, int]) -> None:
    package = pytest.importorskip("pytorch_fid.inception", reason="pip install --no-deps pytorch-fid")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(package, "load_state_dict_from_url", lambda *_, **__: torch.load(inception_file))
        network = package.InceptionV3([3]).eval()
    images = pictures(2, *size)
    with torch.no_grad():
        wanted = network(images / 255)[0].flatten(1)
    torch.testing.assert_close(inception("inception:pytorch-fid", inception_file)(images), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [(64, 80), (512, 512), (300, 299)])
def test_clean_fid_resizes_in_the_same_way(inception_file: Path, size: tuple[int, int]) -> None:
    package = pytest.importorskip("cleanfid.resize", reason="pip install --no-deps clean-fid")
    images = pictures(1, *size)
    resized = torch.from_numpy(package.build_resizer("clean")(images[0].permute(1, 2, 0).numpy())).permute(2, 0, 1)
    extractor = inception("inception:clean-fid", inception_file)
    ours = features.resized(images, (299, 299))[0]
    torch.testing.assert_close(ours, resized, rtol=0, atol=1e-2)  # of 255: torch weighs in single precision
    pixels = (resized[None] - 128) / 128
    with torch.no_grad():
        for name, layer in extractor.network.named_children():
            pixels = pixels if name == "fc" else layer(pixels)
    torch.testing.assert_close(extractor(images), pixels.flatten(1), rtol=1e-3, atol=1e-4)


def test_dinov2_sees_the_whole_picture(dinov2_folder: Path) -> None:
    extractor = load_extractor(f"dinov2:{dinov2_folder}")
    images = pictures(1, 64, 128)
    dark = images.clone()
    dark[..., :16] = 0
    assert not torch.equal(extractor(images), extractor(dark))


@pytest.mark.parametrize(
    "wrong",
    [
        {"crop_size": "x"},
        {"crop_size": -1},
        {"size": {"height": 10**9}},
        {"size": 10_000},
        {"image_mean": [1]},
        {"image_std": [0, 1, 1]},
    ],
)
def test_odd_preprocessing_is_told(dinov2_folder: Path, tmp_path: Path, wrong: dict[str, object]) -> None:
    shutil.copytree(dinov2_folder, tmp_path / "model")
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(wrong))
    with pytest.raises(ElfattError, match=r"preprocessor_config\.json"):
        load_extractor(f"dinov2:{tmp_path / 'model'}")


def test_clip_takes_images_of_its_own_size_alone(clip_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(clip_folder, tmp_path / "model")
    (tmp_path / "model" / "preprocessor_config.json").write_text('{"crop_size": 8}')
    with pytest.raises(ElfattError, match="crop_size=8 is not accepted; accepted: 32, the side of the model's images"):
        load_extractor(f"clip:{tmp_path / 'model'}")


def test_features_that_are_not_finite_are_told(toy_extractor: ToyExtractor) -> None:
    """What a reference keeps of them would be damaged each time that it is computed."""
    damaged = copy.deepcopy(toy_extractor)
    for weight in damaged.network.parameters():
        weight.fill_(float("nan"))
    with pytest.raises(ElfattError, match=r"extractor toy gives NaN, or numbers of 1e\+15 and more"):
        damaged(pictures(1))
