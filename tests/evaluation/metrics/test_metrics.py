"""Metrics of single images against torchmetrics and transformers, and what is refused."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from weights import write_classifier, write_clip

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.extraction import Images
from elfatt_sd.evaluation.metrics import closeness
from elfatt_sd.evaluation.metrics.base import Batch, ImageMetric, MetricChoice
from elfatt_sd.evaluation.metrics.scores import Scorer, _cmmd, check_feature_metrics, load_metrics
from elfatt_sd.evaluation.protocols import Cell, Protocol
from elfatt_sd.files import sha256_of_file

PROMPTS = ["a cat", "a dog in the snow", "an owl"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def clip(folder: Path) -> Path:
    return write_clip(folder / "clip")


@pytest.fixture(scope="module")
def alexnet(folder: Path) -> Path:
    return write_classifier(folder / "alexnet.pth", "alexnet")


def images(seed: int, frames: int = 1, side: int = 64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (len(PROMPTS), frames, 3, side, side), generator=generator, dtype=torch.uint8)


def load(**choice: Any) -> ImageMetric:
    (metric,) = load_metrics([MetricChoice(**choice)], "cpu")
    return metric


@pytest.mark.parametrize("name", ["alexnet", "squeezenet1_1"])
def test_lpips_is_torchmetrics(folder: Path, name: str) -> None:
    from torchmetrics.functional.image import lpips

    path = write_classifier(folder / f"{name}.pth", name)
    metric = load(metric="lpips", weights=str(path))
    network = lpips._LPIPS(pretrained=True, net={"alexnet": "alex"}.get(name, "squeeze"), pnet_rand=True)  # type: ignore[arg-type]
    kept, places = torch.load(path), [key for key, _ in network.net.named_parameters()]
    depth = 2 if name == "squeezenet1_1" else 1
    network.net.load_state_dict({key: kept[f"features.{key.split('.', depth)[-1]}"] for key in places})
    ours, theirs = images(0), images(1)
    expected = network(ours[:, 0] / 255, theirs[:, 0] / 255, normalize=True).flatten()
    found = metric.measure(Batch(ours, PROMPTS, theirs))
    torch.testing.assert_close(found, expected)
    assert (found > 0).all() and metric.measure(Batch(ours, PROMPTS, ours)).abs().max() < 1e-6
    assert metric.compares and not metric.better


def test_dists_is_torchmetrics(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchmetrics.functional.image import dists
    from torchvision.models import vgg

    path = write_classifier(folder / "vgg16.pth", "vgg16")
    metric = load(metric="dists", weights=str(path))
    layers = vgg.make_layers(vgg.cfgs["D"], batch_norm=False)
    layers.load_state_dict({key.removeprefix("features."): value for key, value in torch.load(path).items()})
    monkeypatch.setattr(dists, "vgg16", lambda weights: type("Vgg", (), {"features": layers}))
    ours, theirs = images(0), images(1)
    expected = dists.DISTSNetwork()(ours[:, 0] / 255, theirs[:, 0] / 255)
    torch.testing.assert_close(metric.measure(Batch(ours, PROMPTS, theirs)), expected)
    assert metric.measure(Batch(ours[:1], PROMPTS[:1], ours[:1])).abs().max() < 1e-5


def test_a_clip_has_the_mean_of_its_frames(alexnet: Path, clip: Path) -> None:
    ours, theirs = images(0, frames=3), images(1, frames=3)
    for choice in ({"metric": "lpips", "weights": str(alexnet)}, {"metric": "clip-score", "weights": str(clip)}):
        metric = load(**choice)
        each = [metric.measure(Batch(ours[:, [f]], PROMPTS, theirs[:, [f]])) for f in range(3)]
        torch.testing.assert_close(metric.measure(Batch(ours, PROMPTS, theirs)), torch.stack(each).mean(0))


def test_alignment_is_that_of_transformers(clip: Path) -> None:
    from transformers import CLIPImageProcessor, CLIPModel, CLIPTokenizer

    ours = torch.nn.functional.interpolate(images(0)[:, 0].float(), size=32).byte()[:, None]  # nothing to resize
    model = CLIPModel.from_pretrained(clip)
    pixels = CLIPImageProcessor.from_pretrained(clip)(list(ours[:, 0]), return_tensors="pt")["pixel_values"]
    tokens = CLIPTokenizer.from_pretrained(clip)(PROMPTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        output = model(pixel_values=pixels, **tokens)
    logits = output.logits_per_image.diagonal()
    cosine = logits / model.logit_scale.exp()
    scores = {"clip-score": (100 * cosine).clamp(min=0), "pickscore": logits, "hpsv2": 100 * cosine}
    for kind, expected in scores.items():
        metric = load(metric=kind, weights=str(clip))
        found = metric.measure(Batch(ours, PROMPTS))
        torch.testing.assert_close(found, expected.detach(), rtol=2e-3, atol=2e-3)
        assert metric.better == "higher" and not metric.compares


@pytest.mark.parametrize("kind", ["clip-score", "pickscore", "hpsv2"])
def test_prompts_that_are_cut_off_are_said_to_be_once(clip: Path, kind: str) -> None:
    metric, limit = load(metric=kind, weights=str(clip)), 75
    long = ["a " * limit + "c", "a " * limit + "d"]
    with pytest.warns(UserWarning, match=f"2 of 4 prompts of .* are cut off: the text encoder takes {limit}") as told:
        metric.reads([*long, *PROMPTS[:1], "a " * limit])
        scores = metric.measure(Batch(images(0)[:2], long))
    assert len(told) == 1
    assert scores.isfinite().all()


def test_other_weights_show_in_the_name(alexnet: Path, clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = sha256_of_file(alexnet)
    assert load(metric="lpips", weights=str(alexnet)).name == f"LPIPS (AlexNet, {digest[:8]})"
    known = {"alex": ("AlexNet", "features.10.weight", digest[:8])}
    monkeypatch.setattr(closeness, "_NETWORKS", known)
    assert load(metric="lpips", weights=str(alexnet)).name == "LPIPS (AlexNet)"
    assert load(metric="clip-score", weights=str(clip)).name.startswith("CLIPScore (")


def test_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = images(0), images(1)
    bright = load(metric="own_metrics:brightness", better="higher")
    torch.testing.assert_close(bright.measure(Batch(ours, PROMPTS)), ours.flatten(1).double().mean(1))
    moved = load(metric="own_metrics:moved", name="Moved")
    assert (moved.name, moved.compares, bright.compares) == ("Moved", True, False)
    assert moved.measure(Batch(ours, PROMPTS, ours)).tolist() == [0, 0, 0]
    assert moved.measure(Batch(ours, PROMPTS, theirs)).min() > 0
    assert bright.identity != load(metric="own_metrics:brightness", better="lower").identity


def test_a_parameter_with_a_default_is_not_the_untouched_image() -> None:
    ours = images(0)
    scaled = load(metric="own_metrics:scaled")
    assert not scaled.compares
    torch.testing.assert_close(scaled.measure(Batch(ours, PROMPTS)), 2 * ours.flatten(1).double().mean(1))
    compares = load(metric="own_metrics:maybe_moved")
    assert compares.compares and compares.measure(Batch(ours, PROMPTS, ours)).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("one_number", r"the shape \(\)"),
        ("broken", "RuntimeError: no;|RuntimeError: no\\)"),
        ("alone", r"takes \(images: "),
        ("complex_numbers", "complex numbers; give real"),
        ("needs_a_word", r"takes \(images: .*scale: "),
    ],
)
def test_functions_that_fail(name: str, reason: str) -> None:
    with pytest.raises(ElfattError, match=reason) as raised:
        load(metric=f"own_metrics:{name}").measure(Batch(images(0), PROMPTS))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"metric": "lpip"}, "accepted: lpips, dists"),
        ({"metric": "lpips"}, "accepted: weights, torchvision's file"),
        ({"metric": "prdc", "weights": "x"}, "accepted: none"),
        ({"metric": "lpips", "weights": "x", "better": "lower"}, "better='lower'"),
        ({"metric": "image-reward", "weights": "x"}, "package.module:function"),
        ({"metric": "lpips", "weights": "absent.pth"}, "do not exist"),
        ({"metric": "clip-score", "weights": "absent"}, "no config.json"),
        ({"metric": "own_metrics:absent"}, "cannot be imported"),
        ({"metric": "absent_module:f"}, "cannot be imported"),
        ({"metric": "own_metrics:NUMBER"}, "is a int"),
        ({"metric": ":f"}, "cannot be imported"),
        ({"metric": "own_metrics:ssim"}, "name='ssim' .* is that of another figure"),
        ({"metric": "own_metrics:brightness", "name": "FID (mine)"}, "is that of another figure"),
    ],
)
def test_what_is_refused(choice: dict[str, Any], reason: str) -> None:
    with pytest.raises(ElfattError, match=reason):
        load(**choice)


def test_files_that_are_something_else(folder: Path, clip: Path, alexnet: Path) -> None:
    (folder / "text.pth").write_text("no weights")
    torch.save({"other": torch.zeros(1)}, folder / "other.pth")
    torch.save([1], folder / "list.pth")
    weights = torch.load(alexnet)
    cut = {key: value for key, value in weights.items() if key != "features.3.weight"}
    torch.save(cut, folder / "cut.pth")
    torch.save({**cut, "features.3.weight": torch.zeros(2)}, folder / "shape.pth")
    reasons = {"text": "no(t| file) .*tensors", "other": "no network", "list": "no tensors", "cut": "no 'features.3.we"}
    odd = {
        "whole": weights["features.3.weight"].long(),
        "endless": weights["features.3.weight"] * float("inf"),
        "absent": weights["features.3.weight"].to("meta"),
    }
    for name, weight in odd.items():
        torch.save({**weights, "features.3.weight": weight}, folder / f"{name}.pth")
    reasons |= dict.fromkeys(odd, "'features.3.weight' that is not of finite floating-point numbers")
    for name, reason in {**reasons, "shape": r"a \(2,\) 'features.3"}.items():
        with pytest.raises(ElfattError, match=reason):
            load(metric="lpips", weights=str(folder / f"{name}.pth"))
    with pytest.raises(ElfattError, match="not VGG16's"):
        load(metric="dists", weights=str(alexnet))
    vision = folder / "vision"
    vision.mkdir()
    (vision / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ElfattError, match="of type vit"):
        load(metric="pickscore", weights=str(vision))


def test_images_that_are_too_small_are_refused_before_they_are_made(alexnet: Path) -> None:
    choice = MetricChoice("lpips", str(alexnet))
    says = "metric='lpips' of images of 32x24 pixels is not accepted; accepted: 32 pixels or more on each side"
    with pytest.raises(ElfattError, match=says):
        Protocol("small", (Cell("sd", "SD", "sd", role="baseline"),), height=32, width=24, metrics=(choice,))
    small = torch.zeros(1, 1, 3, 32, 24, dtype=torch.uint8)
    with pytest.raises(ElfattError, match=says):
        load_metrics([choice], "cpu")[0].measure(Batch(small, ["a cat"], small))


def test_two_of_one_name_and_features_that_are_missing() -> None:
    with pytest.raises(ElfattError, match="'brightness' twice"):
        load_metrics([MetricChoice("own_metrics:brightness")] * 2, "cpu")
    for metric in ("prdc", "cmmd"):
        with pytest.raises(ElfattError, match="needs"):
            check_feature_metrics([MetricChoice(metric)], [])


def row(folder: Path, name: str, lighter: int) -> Images:
    """40 images of one grey each, in as many classes."""
    (folder / name).mkdir(parents=True)
    paths = [folder / name / f"{number}.png" for number in range(40)]
    for number, path in enumerate(paths):
        Image.new("RGB", (8, 8), (100 + 2 * number % 7 + lighter,) * 3).save(path)
    return Images(name, paths, [sha256_of_file(path) for path in paths], range(40), ["a cat"] * 40)


@pytest.mark.parametrize(("better", "verdict"), [("higher", "better"), ("lower", "worse"), ("", None)])
def test_a_paired_difference_has_a_verdict(tmp_path: Path, better: Any, verdict: str | None) -> None:
    choices = [MetricChoice("own_metrics:brightness", better=better), MetricChoice("own_metrics:moved")]
    scorer: Any = Scorer(choices, load_metrics(choices, "cpu"), [], tmp_path)
    light, dark = row(tmp_path, "light", 20), row(tmp_path, "dark", 0)
    found = scorer.score(light, dark)
    assert found["brightness"]["difference"]["value"] == pytest.approx(20)
    assert found["brightness"]["difference"].get("verdict") == verdict
    assert found["moved"]["value"] == pytest.approx(20)
    assert "difference" not in scorer.score(dark, None)["brightness"]
    assert "moved" not in scorer.score(dark, None)


def test_a_row_of_few_even_classes_has_no_verdict(tmp_path: Path) -> None:
    choices = [MetricChoice("own_metrics:brightness", better="higher")]
    scorer: Any = Scorer(choices, load_metrics(choices, "cpu"), [], tmp_path)
    classes = [0] * 9 + list(range(1, 32))
    light, dark = (dataclasses.replace(row(tmp_path, name, by), classes=classes) for name, by in (("a", 20), ("b", 0)))
    assert scorer.score(light, dark)["brightness"]["difference"]["verdict"] == "too few classes to tell"


@pytest.mark.parametrize("name", ["endless", "astronomic"])
def test_numbers_that_no_mean_holds_are_refused(tmp_path: Path, name: str) -> None:
    choices = [MetricChoice(f"own_metrics:{name}")]
    scorer: Any = Scorer(choices, load_metrics(choices, "cpu"), [], tmp_path)
    with pytest.raises(ElfattError, match="of image 0 of row 'a' is"):
        scorer.score(row(tmp_path, "a", 0), None)


def test_cmmd_is_its_formula() -> None:
    """1000 times the unbiased squared discrepancy of unit features under exp(-|x - y|^2 / 200)."""
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (torch.randn(n, 6, generator=generator, dtype=torch.float64) for n in (9, 12))

    def mean(one: Tensor, other: Tensor) -> Tensor:
        kernel = torch.exp(-torch.cdist(one, other).square() / 200)
        own = len(one) if one is other else 0
        return (kernel.sum() - own) / (kernel.numel() - own)

    x, y = (torch.nn.functional.normalize(each, dim=1) for each in (ours, theirs))
    expected = 1000 * (mean(x, x) + mean(y, y) - 2 * mean(x, y))
    assert _cmmd(ours, theirs, range(9)).value == pytest.approx(expected.item(), rel=1e-4)


def test_torchvision_is_asked_for_only_where_it_is_used(alexnet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None if name == "torchvision" else object())
    load(metric="own_metrics:brightness")
    with pytest.raises(ElfattError, match=r"pip install .*inception"):
        load(metric="lpips", weights=str(alexnet))


def test_a_function_needs_no_package_that_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("def f(images, prompts):\n    return [1.0] * len(prompts)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    first = load(metric="mine:f").identity
    (tmp_path / "mine.py").write_text("def f(images, prompts):\n    return [2.0] * len(prompts)\n")
    del sys.modules["mine"]
    import linecache

    linecache.clearcache()
    assert load(metric="mine:f").identity != first, "the function's code is part of the metric"
