"""Extractors and metrics against the packages that define them, with random weights; functions of one's own."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from own_metrics import write_classifier, write_clip
from PIL import Image
from support import runs
from torch import Tensor

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation import features
from elfatt_sd.evaluation import metrics as module
from elfatt_sd.evaluation.extraction import Images
from elfatt_sd.evaluation.features import Extractor, load_extractor, toy_attributes
from elfatt_sd.evaluation.metrics import Batch, ImageMetric, MetricChoice, load_metrics
from elfatt_sd.evaluation.protocols import Cell, Protocol
from elfatt_sd.evaluation.score import Scorer, score_inputs
from elfatt_sd.files import sha256_of_file
from elfatt_sd.toy.features import load_feature_extractor

PROMPTS = ["a cat", "a dog in the snow", "an owl"]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("weights")
    return {name: write_classifier(folder / name, name) for name in ("alexnet", "squeezenet1_1", "vgg16")}


def images(seed: int, frames: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (len(PROMPTS), frames, 3, 64, 64), generator=generator, dtype=torch.uint8)


def load(**choice: Any) -> ImageMetric:
    (metric,) = load_metrics([MetricChoice(**choice)], "cpu")
    return metric


@pytest.mark.parametrize(("name", "net"), [("alexnet", "alex"), ("squeezenet1_1", "squeeze"), ("vgg16", "")])
def test_closeness_networks(classifiers: dict[str, Path], name: str, net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its network with the weights of a file, by the number of names before those of the file."""
    from torchmetrics.functional.image import dists
    from torchmetrics.functional.image.lpips import _LPIPS
    from torchvision.models import vgg

    weights: dict[str, Tensor] = torch.load(classifiers[name])
    network: Any
    if net:
        network = _LPIPS(pretrained=True, net=net, pnet_rand=True)
        depth, places = 1 if net == "alex" else 2, [key for key, _ in network.net.named_parameters()]
        network.net.load_state_dict({key: weights[f"features.{key.split('.', depth)[-1]}"] for key in places})
    else:
        layers = vgg.make_layers(vgg.cfgs["D"], batch_norm=False)
        layers.load_state_dict({key.removeprefix("features."): value for key, value in weights.items()})
        monkeypatch.setattr(dists, "vgg16", lambda weights: type("Vgg", (), {"features": layers}))
        network = dists.DISTSNetwork()
    metric = load(metric="lpips" if net else "dists", weights=str(classifiers[name]))
    ours, theirs = images(0), images(1)
    found = metric.measure(Batch(ours, PROMPTS, theirs))
    expected = network(ours[:, 0] / 255, theirs[:, 0] / 255, **({"normalize": True} if net else {}))
    torch.testing.assert_close(found, expected.flatten())
    assert (found > 0).all() and metric.measure(Batch(ours[:1], PROMPTS[:1], ours[:1])).abs().max() < 1e-5
    assert metric.compares and not metric.better


def test_alignment_is_that_of_transformers(clip: Path) -> None:
    from transformers import CLIPImageProcessor, CLIPModel, CLIPTokenizer

    ours = torch.nn.functional.interpolate(images(0)[:, 0].float(), size=32).byte()[:, None]  # nothing to resize
    model = CLIPModel.from_pretrained(clip)
    pixels = CLIPImageProcessor.from_pretrained(clip)(list(ours[:, 0]), return_tensors="pt")["pixel_values"]
    tokens = CLIPTokenizer.from_pretrained(clip)(PROMPTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(pixel_values=pixels, **tokens).logits_per_image.diagonal()
    cosine = logits / model.logit_scale.exp()
    scores = {"clip-score": (100 * cosine).clamp(min=0), "pickscore": logits, "hpsv2": 100 * cosine}
    for kind, expected in scores.items():
        metric = load(metric=kind, weights=str(clip))
        torch.testing.assert_close(metric.measure(Batch(ours, PROMPTS)), expected.detach(), rtol=2e-3, atol=2e-3)
        assert metric.better == "higher" and not metric.compares


def test_clips_prompts_and_names(classifiers: dict[str, Path], clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clip has the mean of its frames; prompts that are cut off are told once; other weights show in the name."""
    alexnet = classifiers["alexnet"]
    closeness, alignment = load(metric="lpips", weights=str(alexnet)), load(metric="clip-score", weights=str(clip))
    ours, theirs = images(0, frames=3), images(1, frames=3)
    for metric in (closeness, alignment):
        each = [metric.measure(Batch(ours[:, [f]], PROMPTS, theirs[:, [f]])) for f in range(3)]
        torch.testing.assert_close(metric.measure(Batch(ours, PROMPTS, theirs)), torch.stack(each).mean(0))
    long = ["a " * 75 + "c", "a " * 75 + "d"]
    with pytest.warns(UserWarning, match="2 of 4 prompts of .* are cut off: the text encoder takes 75"):
        load_metrics([MetricChoice("clip-score", str(clip))], "cpu", [*long, *PROMPTS[:1], "a " * 75, *long])
    assert alignment.measure(Batch(images(0)[:2], long)).isfinite().all()
    digest = sha256_of_file(alexnet)
    assert alignment.name.startswith("CLIPScore (") and closeness.name == f"LPIPS (AlexNet, {digest[:8]})"
    monkeypatch.setattr(module, "_NETWORKS", {"alex": ("AlexNet", "features.10.weight", digest[:8])})
    assert load(metric="lpips", weights=str(alexnet)).name == "LPIPS (AlexNet)"


def test_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = images(0), images(1)
    light = ours.flatten(1).double().mean(1)
    bright, scaled = load(metric="own_metrics:brightness", better="higher"), load(metric="own_metrics:scaled")
    torch.testing.assert_close(bright.measure(Batch(ours, PROMPTS)), light)
    torch.testing.assert_close(scaled.measure(Batch(ours, PROMPTS)), 2 * light)
    moved = load(metric="own_metrics:moved", name="Moved")
    assert (moved.name, moved.compares, bright.compares, scaled.compares) == ("Moved", True, False, False)
    for metric in (moved, load(metric="own_metrics:maybe_moved")):
        assert metric.measure(Batch(ours, PROMPTS, ours)).tolist() == [0, 0, 0]
        assert metric.measure(Batch(ours, PROMPTS, theirs)).min() > 0
    assert bright.identity != load(metric="own_metrics:brightness", better="lower").identity
    monkeypatch.syspath_prepend(str(tmp_path))
    found = set()
    for name, value in (("mine", 1.0), ("other", 2.0)):  # the function's code is part of the metric
        (tmp_path / f"{name}.py").write_text(f"def f(images, prompts):\n    return [{value}] * len(prompts)\n")
        found.add(load(metric=f"{name}:f").description["code_sha256"])
    assert len(found) == 2


def test_refusals(tmp_path: Path, classifiers: dict[str, Path], clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, own = torch.load(classifiers["alexnet"]), "own_metrics:brightness"
    cut = {key: value for key, value in whole.items() if key != "features.3.weight"}
    cases: list[tuple[dict[str, Any], Any, str]] = [
        ({"metric": "lpip"}, None, "accepted: lpips, dists"),
        ({"metric": "lpips"}, None, "accepted: weights, torchvision's file"),
        ({"metric": "cmmd", "weights": "x"}, None, "accepted: none"),
        ({"metric": "lpips", "weights": "x", "better": "lower"}, None, "better='lower'"),
        ({"metric": "lpips", "weights": "absent.pth"}, None, "weights absent.pth cannot be loaded"),
        ({"metric": "clip-score", "weights": "absent"}, None, "no config.json"),
        ({"metric": "own_metrics:absent"}, None, "has no attribute 'absent'"),
        ({"metric": "absent_module:f"}, None, "No module named 'absent_module'"),
        ({"metric": own, "name": "FID (mine)"}, None, r"name='FID \(mine\)' .* is that of another figure"),
        ({"metric": own, "name": "ssim"}, None, "is that of another figure"),
        ({"metric": "own_metrics:one_number"}, None, r"the shape \(\)"),
        ({"metric": "own_metrics:broken"}, None, r"RuntimeError: no way\)"),
        ({"metric": "own_metrics:needs_a_word"}, None, "missing a required argument: 'scale'"),
        ({"metric": "lpips"}, {"other": torch.zeros(1)}, "of no network of LPIPS; give torchvision's file of AlexNet,"),
        ({"metric": "lpips"}, torch.zeros(1), "cannot be loaded"),
        ({"metric": "lpips"}, cut, r"cannot be loaded \(KeyError: 'features.3.weight'"),
        ({"metric": "lpips"}, {**cut, "features.3.weight": torch.zeros(1)}, "cannot be loaded"),
        ({"metric": "dists"}, whole, "of no network of DISTS; give torchvision's file of VGG16"),
    ]
    for choice, content, reason in cases:
        if content is not None:
            torch.save(content, tmp_path / "odd.pth")
            choice = {**choice, "weights": str(tmp_path / "odd.pth")}
        with pytest.raises(ElfattError, match=reason) as raised:
            load(**choice).measure(Batch(images(0), PROMPTS))
        assert "\n" not in str(raised.value)
    with pytest.raises(ElfattError, match="needs CLIP's features"):
        score_inputs(runs.protocol(metrics=(MetricChoice("cmmd"),)), [])
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None if name == "torchvision" else object())
    with pytest.raises(ElfattError, match=r"pip install .*inception"):
        load(metric="lpips", weights=str(classifiers["alexnet"]))


def row(folder: Path, name: str, lighter: int) -> Images:
    """40 images of one grey each."""
    (folder / name).mkdir(parents=True)
    paths = [folder / name / f"{number}.png" for number in range(40)]
    for number, path in enumerate(paths):
        Image.new("RGB", (8, 8), (100 + 2 * number % 7 + lighter,) * 3).save(path)
    return Images(name, paths, [sha256_of_file(path) for path in paths], range(40), ["a cat"] * 40)


def test_a_paired_difference_has_a_verdict(tmp_path: Path) -> None:
    def scorer(*choices: MetricChoice) -> Scorer:
        protocol = Protocol("p", (Cell("sd", "SD", "sd", role="baseline"),), metrics=choices)
        return Scorer(protocol, load_metrics(choices, "cpu"), [])

    uneven = [0] * 9 + list(range(1, 32))
    cases: tuple[tuple[Any, Any, str | None], ...] = (
        ("higher", range(40), "better"),
        ("lower", range(40), "worse"),
        ("", range(40), None),
        ("higher", uneven, "too few classes to tell"),
    )
    images = [row(tmp_path, *each) for each in (("light", 20), ("dark", 0))]
    for better, classes, verdict in cases:
        judge = scorer(MetricChoice("own_metrics:brightness", better=better), MetricChoice("own_metrics:moved"))
        light, dark = (judge.measure(replace(each, classes=classes)) for each in images)
        found, alone = judge.score(light, dark)["metrics"], judge.score(dark, None)["metrics"]
        assert found["brightness"]["difference"]["value"] == pytest.approx(20)
        assert found["brightness"]["difference"].get("verdict") == verdict
        assert found["moved"]["value"] == pytest.approx(20)
        assert "difference" not in alone["brightness"] and "moved" not in alone
    with pytest.raises(ElfattError, match="of image 0 of row 'a' is"):
        scorer(MetricChoice("own_metrics:endless")).measure(row(tmp_path, "a", 0))


WAYS = ("inception", "inception:torch-fidelity", "inception:pytorch-fid", "inception:clean-fid")


def pictures(count: int, height: int = 64, width: int = 64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8, generator=generator)


def inception(way: str, file: Path) -> Extractor:
    return load_extractor(way, weights=file, sha256=sha256_of_file(file))


def test_inception_resizes_as_tensorflow_did_and_only_the_published_weights_give_fid(
    inception_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The published statistics need TensorFlow 1's resizing; torchmetrics' own default has antialiasing."""
    fidelity = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3")
    extractor, digest = inception("inception", inception_file), sha256_of_file(inception_file)
    original = fidelity.FeatureExtractorInceptionV3("inception-v3-compat", ["2048"], str(inception_file))
    images = pictures(2, 320, 400)
    found = extractor(images)
    assert (found.shape, found.dtype, extractor.dimension) == ((2, 2048), torch.float32, 2048)
    torch.testing.assert_close(found, original(images)[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1:2], extractor(images[1:2]), rtol=1e-4, atol=1e-5)
    names = (extractor.distance_name, extractor.kernel_name)
    assert names == (f"FD-Inception-{digest[:8]}", f"KD-Inception-{digest[:8]}")
    assert features.INCEPTION_SHA256.startswith("6726825d")
    monkeypatch.setattr(features, "INCEPTION_SHA256", digest)
    ways = [load_extractor(way, weights=inception_file) for way in WAYS]
    assert [each.distance_name for each in ways] == ["FID", "FID", "FID (pytorch-fid)", "FID (clean-fid)"]
    assert [each.kernel_name for each in ways] == ["KID", "KID", "KID (pytorch-fid)", "KID (clean-fid)"]
    assert len({each.identity for each in ways}) == 3
    plain, same, *others = (each(pictures(1, 96, 120)) for each in ways)
    assert torch.equal(plain, same)
    assert not any(torch.allclose(plain, other, rtol=1e-3) for other in others)
    whole, _, other_scale, clean = (each(pictures(1, 299, 299)) for each in ways)  # not resized: scales differ alone
    torch.testing.assert_close(clean, whole, rtol=1e-4, atol=1e-5)
    assert (other_scale - whole).abs().max() < 0.1 * whole.abs().max()


def test_toy_features_and_attributes() -> None:
    extractor, images = load_extractor("toy"), pictures(2, 256, 256)
    found = extractor(images)
    assert (found.shape, extractor.distance_name) == ((2, extractor.dimension), "FD-toy")
    network, seen = load_feature_extractor(), toy_attributes(extractor, found)
    assert list(seen) == ["shape", "color", "pattern", "background"]
    assert all(torch.equal(seen[name], scores.argmax(1)) for name, scores in network.scores(network(images)).items())
    flat, large = (torch.full((1, 3, side, side), 90, dtype=torch.uint8) for side in (128, 256))
    torch.testing.assert_close(extractor(flat), extractor(large), rtol=1e-4, atol=1e-5)
    for weight in extractor.network.parameters():  # a reference would be damaged each time that it is computed
        weight.fill_(float("nan"))
    with pytest.raises(ElfattError, match=r"extractor toy gives NaN, or numbers of 1e\+15 and more"):
        extractor(images)


@pytest.fixture(scope="module")
def models(clip: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories of models: a `clip` with its text part; `cut`, without the projection; `dinov2`."""
    from transformers import CLIPModel, CLIPVisionModel, Dinov2Config, Dinov2Model

    made: Path = tmp_path_factory.mktemp("models")
    shutil.copytree(clip, made / "clip")
    CLIPVisionModel(CLIPModel.from_pretrained(clip).config.vision_config).save_pretrained(made / "cut")
    config = Dinov2Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14)
    Dinov2Model(config).save_pretrained(made / "dinov2")
    return made


def test_directories_of_models_and_their_preprocessing(models: Path, tmp_path: Path) -> None:
    extractor, plain = load_extractor(f"clip:{models / 'clip'}"), load_extractor(f"dinov2:{models / 'dinov2'}")
    names = (extractor.distance_name, extractor.kernel_name, extractor.dimension)
    assert names == ("FD-CLIP (ViT of width 32/8@32)", "KD-CLIP (ViT of width 32/8@32)", 24)
    assert (plain.distance_name, plain.dimension) == ("FD-DINOv2 (ViT of width 32/14@28)", 32)
    images = pictures(3, 48, 80)
    found, dark = extractor(images), images.clone()
    assert found.shape == (3, 24)
    torch.testing.assert_close(found[:1], extractor(images[:1]), rtol=1e-4, atol=1e-5)
    dark[:, :, :, :10] = 0  # CLIP sees only the centre of the wide picture, DINOv2 all of it
    torch.testing.assert_close(extractor(dark), found)
    assert not torch.equal(plain(images), plain(dark))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        surrounded = extractor(images)
    assert torch.equal(surrounded, found), "float32, whatever surrounds it"
    stored = {"size": {"shortest_edge": 32}, "crop_size": {"height": 28, "width": 28}, "image_mean": [0.5, 0.5, 0.5]}
    shutil.copytree(models / "dinov2", tmp_path / "other")
    (tmp_path / "other" / "preprocessor_config.json").write_text(json.dumps(stored))
    other = load_extractor(f"dinov2:{tmp_path / 'other'}")
    assert (other.preprocessing["shortest_edge"], other.preprocessing["crop"]) == (32, 28)
    assert other.identity != plain.identity
    assert not torch.allclose(other(images), plain(images), atol=1e-3)
    shutil.copytree(models / "clip", tmp_path / "model")
    for text in ("{", "[]", '{"crop_size": 8}'):  # CLIP takes images of its own size alone
        (tmp_path / "model" / "preprocessor_config.json").write_text(text)
        with pytest.raises(ElfattError, match=r"preprocessor_config\.json"):
            load_extractor(f"clip:{tmp_path / 'model'}")


def test_other_models_weights_and_extractors_are_refused(models: Path, inception_file: Path, tmp_path: Path) -> None:
    """Transformers would fill what is missing with random numbers, and a pickle could run any code."""
    for name, content in (("empty", {"a": torch.zeros(1)}), ("pickled", Path("."))):
        torch.save(content, tmp_path / f"{name}.pth")
    cases: list[tuple[str, Path | None, bool, str]] = [
        ("resnet", None, False, "accepted: inception, inception:pytorch-fid, .*dinov2:DIR"),
        ("clip:", None, False, "accepted: inception"),
        ("dinov2:/nowhere", None, False, "no config.json"),
        (f"clip:{models / 'dinov2'}", None, False, "is of type dinov2; accepted: clip"),
        (f"dinov2:{models / 'clip'}", None, False, "is of type clip; accepted: dinov2"),
        (f"clip:{models / 'cut'}", None, False, r"lacks 1 of its weights, first visual_projection\.weight"),
        ("inception", inception_file, False, f"accepted is {features.INCEPTION_SHA256}"),
        ("inception", tmp_path / "none.pth", False, "do not exist"),
        ("inception", tmp_path / "empty.pth", True, "cannot be loaded"),
        ("inception", tmp_path / "pickled.pth", True, "cannot be loaded .*Weights only load failed"),
    ]
    for spec, path, own, reason in cases:
        with pytest.raises(ElfattError, match=reason):
            load_extractor(spec, weights=path, sha256=sha256_of_file(path) if path and own else None)
