"""Metrics against torchmetrics, transformers and their definitions; a function of one's own; and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from own_metrics import write_classifier, write_clip
from PIL import Image
from support.runs import normal
from torch import Tensor

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.extraction import Images
from elfatt_sd.evaluation.metrics import closeness
from elfatt_sd.evaluation.metrics.base import Batch, ImageMetric, MetricChoice
from elfatt_sd.evaluation.metrics.scores import (
    NEIGHBOURS,
    Scorer,
    _cmmd,
    check_feature_metrics,
    load_metrics,
    neighbour_figures,
)
from elfatt_sd.evaluation.protocols import Cell, Protocol
from elfatt_sd.evaluation.statistics import Estimate
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


def images(seed: int, frames: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (len(PROMPTS), frames, 3, 64, 64), generator=generator, dtype=torch.uint8)


def load(**choice: Any) -> ImageMetric:
    (metric,) = load_metrics([MetricChoice(**choice)], "cpu")
    return metric


@pytest.mark.parametrize(("name", "net", "depth"), [("alexnet", "alex", 1), ("squeezenet1_1", "squeeze", 2)])
def test_lpips_is_torchmetrics(folder: Path, name: str, net: Any, depth: int) -> None:
    from torchmetrics.functional.image import lpips

    path = write_classifier(folder / f"{name}.pth", name)
    metric = load(metric="lpips", weights=str(path))
    network = lpips._LPIPS(pretrained=True, net=net, pnet_rand=True)
    kept, places = torch.load(path), [key for key, _ in network.net.named_parameters()]
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
        logits = model(pixel_values=pixels, **tokens).logits_per_image.diagonal()
    cosine = logits / model.logit_scale.exp()
    scores = {"clip-score": (100 * cosine).clamp(min=0), "pickscore": logits, "hpsv2": 100 * cosine}
    for kind, expected in scores.items():
        metric = load(metric=kind, weights=str(clip))
        torch.testing.assert_close(metric.measure(Batch(ours, PROMPTS)), expected.detach(), rtol=2e-3, atol=2e-3)
        assert metric.better == "higher" and not metric.compares


def test_prompts_that_are_cut_off_are_said_to_be_once(clip: Path) -> None:
    metric = load(metric="clip-score", weights=str(clip))
    long = ["a " * 75 + "c", "a " * 75 + "d"]
    with pytest.warns(UserWarning, match="2 of 4 prompts of .* are cut off: the text encoder takes 75") as told:
        metric.reads([*long, *PROMPTS[:1], "a " * 75])
        metric.reads(long)
    assert len(told) == 1
    assert metric.measure(Batch(images(0)[:2], long)).isfinite().all()


def test_other_weights_show_in_the_name(alexnet: Path, clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = sha256_of_file(alexnet)
    assert load(metric="lpips", weights=str(alexnet)).name == f"LPIPS (AlexNet, {digest[:8]})"
    monkeypatch.setattr(closeness, "_NETWORKS", {"alex": ("AlexNet", "features.10.weight", digest[:8])})
    assert load(metric="lpips", weights=str(alexnet)).name == "LPIPS (AlexNet)"
    assert load(metric="clip-score", weights=str(clip)).name.startswith("CLIPScore (")


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
    found = set()
    for name, value in (("mine", 1.0), ("other", 2.0)):  # the function's code is part of the metric
        (tmp_path / f"{name}.py").write_text(f"def f(images, prompts):\n    return [{value}] * len(prompts)\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        found.add(load(metric=f"{name}:f").description["code_sha256"])
    assert len(found) == 2


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"metric": "lpip"}, "accepted: lpips, dists"),
        ({"metric": "lpips"}, "accepted: weights, torchvision's file"),
        ({"metric": "prdc", "weights": "x"}, "accepted: none"),
        ({"metric": "lpips", "weights": "x", "better": "lower"}, "better='lower'"),
        ({"metric": "image-reward", "weights": "x"}, "package.module:function"),
        ({"metric": "lpips", "weights": "absent.pth"}, "not a file of tensors"),
        ({"metric": "clip-score", "weights": "absent"}, "no config.json"),
        ({"metric": "own_metrics:absent"}, "cannot be imported"),
        ({"metric": "absent_module:f"}, "cannot be imported"),
        ({"metric": "own_metrics:PROMPTS"}, "cannot be imported"),
        ({"metric": "own_metrics:ssim"}, "name='ssim' .* is that of another figure"),
        ({"metric": "own_metrics:brightness", "name": "FID (mine)"}, "is that of another figure"),
        ({"metric": "own_metrics:one_number"}, r"the shape \(\)"),
        ({"metric": "own_metrics:broken"}, r"RuntimeError: no\)"),
        ({"metric": "own_metrics:complex_numbers"}, "complex numbers"),
        ({"metric": "own_metrics:needs_a_word"}, r"with \(images: .*scale: "),
    ],
)
def test_what_is_refused(choice: dict[str, Any], reason: str) -> None:
    with pytest.raises(ElfattError, match=reason) as raised:
        load(**choice).measure(Batch(images(0), PROMPTS))
    assert "\n" not in str(raised.value)


def test_files_that_are_something_else(folder: Path, alexnet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.load(alexnet)
    cut = {key: value for key, value in weights.items() if key != "features.3.weight"}
    contents = {
        "other": ({"other": torch.zeros(1)}, "no network"),
        "list": ([1], "not a file of tensors"),
        "cut": (cut, "no 'features.3.weight'"),
        "nan": ({**weights, "features.3.weight": weights["features.3.weight"] * torch.nan}, "finite numbers"),
        "shape": ({**cut, "features.3.weight": torch.zeros(2)}, r"a \(2,\) 'features.3"),
    }
    for name, (content, reason) in contents.items():
        torch.save(content, folder / f"{name}.pth")
        with pytest.raises(ElfattError, match=reason):
            load(metric="lpips", weights=str(folder / f"{name}.pth"))
    with pytest.raises(ElfattError, match="not VGG16's"):
        load(metric="dists", weights=str(alexnet))
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None if name == "torchvision" else object())
    load(metric="own_metrics:brightness")
    with pytest.raises(ElfattError, match=r"pip install .*inception"):
        load(metric="lpips", weights=str(alexnet))


def test_what_a_protocol_may_not_choose(alexnet: Path) -> None:
    choice = MetricChoice("lpips", str(alexnet))
    with pytest.raises(ElfattError, match="metric='lpips' of images of 32x24 pixels is not accepted; accepted: 32"):
        Protocol("small", (Cell("sd", "SD", "sd", role="baseline"),), height=32, width=24, metrics=(choice,))
    with pytest.raises(ElfattError, match="'brightness' twice"):
        load_metrics([MetricChoice("own_metrics:brightness")] * 2, "cpu")
    for metric in ("prdc", "cmmd"):
        with pytest.raises(ElfattError, match="needs"):
            check_feature_metrics([MetricChoice(metric)], [])


def row(folder: Path, name: str, lighter: int, classes: Any = range(40)) -> Images:
    """40 images of one grey each."""
    (folder / name).mkdir(parents=True)
    paths = [folder / name / f"{number}.png" for number in range(40)]
    for number, path in enumerate(paths):
        Image.new("RGB", (8, 8), (100 + 2 * number % 7 + lighter,) * 3).save(path)
    return Images(name, paths, [sha256_of_file(path) for path in paths], classes, ["a cat"] * 40)


UNEVEN = [0] * 9 + list(range(1, 32))


@pytest.mark.parametrize(
    ("better", "classes", "verdict"),
    [
        ("higher", range(40), "better"),
        ("lower", range(40), "worse"),
        ("", range(40), None),
        ("higher", UNEVEN, "too few classes to tell"),
    ],
)
def test_a_paired_difference_has_a_verdict(tmp_path: Path, better: Any, classes: Any, verdict: str | None) -> None:
    choices = [MetricChoice("own_metrics:brightness", better=better), MetricChoice("own_metrics:moved")]
    scorer: Any = Scorer(choices, load_metrics(choices, "cpu"), [], tmp_path)
    light, dark = row(tmp_path, "light", 20, classes), row(tmp_path, "dark", 0, classes)
    found = scorer.score(light, dark)
    assert found["brightness"]["difference"]["value"] == pytest.approx(20)
    assert found["brightness"]["difference"].get("verdict") == verdict
    assert found["moved"]["value"] == pytest.approx(20)
    assert "difference" not in scorer.score(dark, None)["brightness"]
    assert "moved" not in scorer.score(dark, None)


def test_numbers_that_no_mean_holds_are_refused(tmp_path: Path) -> None:
    choices = [MetricChoice("own_metrics:endless")]
    scorer: Any = Scorer(choices, load_metrics(choices, "cpu"), [], tmp_path)
    with pytest.raises(ElfattError, match="of image 0 of row 'a' is"):
        scorer.score(row(tmp_path, "a", 0), None)


def test_cmmd_is_its_formula() -> None:
    """1000 times the unbiased squared discrepancy of unit features under exp(-|x - y|^2 / 200)."""
    ours, theirs = normal(9, 6, 0), normal(12, 6, 1)

    def mean(one: Tensor, other: Tensor) -> Tensor:
        kernel = torch.exp(-torch.cdist(one, other).square() / 200)
        own = len(one) if one is other else 0
        return (kernel.sum() - own) / (kernel.numel() - own)

    x, y = (torch.nn.functional.normalize(each, dim=1) for each in (ours, theirs))
    expected = 1000 * (mean(x, x) + mean(y, y) - 2 * mean(x, y))
    assert _cmmd(ours, theirs, range(9)).value == pytest.approx(expected.item(), rel=1e-4)


def by_definition(images: Tensor, known: Tensor) -> dict[str, float]:
    """Precision, recall, density and coverage by loops over all pairs."""

    def radius(point: int, points: Tensor) -> Tensor:
        far = (points - points[point]).norm(dim=1)
        return far[torch.arange(len(points)) != point].sort().values[NEIGHBOURS - 1]

    of_known = torch.stack([radius(place, known) for place in range(len(known))])
    of_images = torch.stack([radius(place, images) for place in range(len(images))])
    far = torch.stack([(known - image).norm(dim=1) for image in images])
    return {
        "Precision": (far <= of_known).any(1).double().mean().item(),
        "Recall": (far <= of_images[:, None]).any(0).double().mean().item(),
        "Density": (far <= of_known).double().sum(1).mean().item() / NEIGHBOURS,
        "Coverage": (far <= of_known).any(0).double().mean().item(),
    }


@pytest.mark.parametrize("each", [1, 2, 7])
def test_neighbours_are_those_of_the_definitions_with_and_without_each_class(each: int) -> None:
    images, known = normal(60, 3, 1) + 0.6, normal(50, 3, 1001)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    groups = torch.arange(60) // each
    found = neighbour_figures(images[order], known, groups[order])
    expected = by_definition(images, known)
    assert {name: figure.value for name, figure in found.items()} == pytest.approx(expected)
    assert all(0 < value < 2 for value in expected.values())
    rest = [by_definition(images[groups != left], known) for left in groups.unique()]
    for name in ("Recall", "Coverage"):
        without = torch.tensor([figures[name] for figures in rest], dtype=torch.float64)
        moves = (without.mean() - without) * (len(rest) - 1) / len(rest)
        torch.testing.assert_close(found[name].moves[0], moves, rtol=0, atol=1e-12)
    with pytest.raises(ElfattError, match=f"more than {NEIGHBOURS}"):
        neighbour_figures(images[:NEIGHBOURS], known, range(NEIGHBOURS))


def test_intervals_of_paired_differences_of_neighbours_cover() -> None:
    """Two methods of the same latents; the truth is the mean over many draws. Jackknives of such figures are wide."""
    known, names = normal(300, 4, 10_000), ("Recall", "Density", "Coverage")
    runs: dict[str, list[Estimate]] = {name: [] for name in names}
    for seed in range(40):
        images = normal(200, 4, seed)
        first, second = (neighbour_figures(each, known, range(200)) for each in (images * 0.75 + 0.2, images * 0.6))
        for name in names:
            runs[name].append(first[name] - second[name])
    for name, found in runs.items():
        truth = sum(each.value for each in found) / len(found)
        intervals = [each.interval() for each in found]
        assert sum(ends is not None and ends[0] <= truth <= ends[1] for ends in intervals) >= 37, name
