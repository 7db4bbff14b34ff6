"""Metrics against torchmetrics, transformers and their definitions; a function of one's own; and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from own_metrics import write_classifier, write_clip
from PIL import Image
from torch import Tensor

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation import metrics as module
from elfatt_sd.evaluation.extraction import Images
from elfatt_sd.evaluation.metrics import Batch, ImageMetric, MetricChoice, check_feature_metrics, load_metrics
from elfatt_sd.evaluation.protocols import Cell, Protocol
from elfatt_sd.evaluation.score import Scorer
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


def lpips(path: Path, net: Any, depth: int) -> Any:
    """Torchmetrics' network with the weights of a file, by the number of names before those of the file."""
    from torchmetrics.functional.image.lpips import _LPIPS

    network: Any = _LPIPS(pretrained=True, net=net, pnet_rand=True)
    kept, places = torch.load(path), [key for key, _ in network.net.named_parameters()]
    network.net.load_state_dict({key: kept[f"features.{key.split('.', depth)[-1]}"] for key in places})
    return lambda ours, theirs: network(ours, theirs, normalize=True).flatten()


def dists(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from torchmetrics.functional.image import dists
    from torchvision.models import vgg

    layers = vgg.make_layers(vgg.cfgs["D"], batch_norm=False)
    layers.load_state_dict({key.removeprefix("features."): value for key, value in torch.load(path).items()})
    monkeypatch.setattr(dists, "vgg16", lambda weights: type("Vgg", (), {"features": layers}))
    return dists.DISTSNetwork()


@pytest.mark.parametrize("name", ["alexnet", "squeezenet1_1", "vgg16"])
def test_closeness_is_torchmetrics(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_classifier(folder / f"{name}-closeness.pth", name)
    metric = load(metric="dists" if name == "vgg16" else "lpips", weights=str(path))
    depth, net = (1, "alex") if name == "alexnet" else (2, "squeeze")
    network = dists(path, monkeypatch) if name == "vgg16" else lpips(path, net, depth)
    ours, theirs = images(0), images(1)
    found = metric.measure(Batch(ours, PROMPTS, theirs))
    torch.testing.assert_close(found, network(ours[:, 0] / 255, theirs[:, 0] / 255))
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


def test_clips_long_prompts_and_names(alexnet: Path, clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clip has the mean of its frames; prompts that are cut off are told once; other weights show in the name."""
    closeness, alignment = load(metric="lpips", weights=str(alexnet)), load(metric="clip-score", weights=str(clip))
    ours, theirs = images(0, frames=3), images(1, frames=3)
    for metric in (closeness, alignment):
        each = [metric.measure(Batch(ours[:, [f]], PROMPTS, theirs[:, [f]])) for f in range(3)]
        torch.testing.assert_close(metric.measure(Batch(ours, PROMPTS, theirs)), torch.stack(each).mean(0))
    long = ["a " * 75 + "c", "a " * 75 + "d"]
    with pytest.warns(UserWarning, match="2 of 4 prompts of .* are cut off: the text encoder takes 75") as told:
        alignment.reads([*long, *PROMPTS[:1], "a " * 75])
        alignment.reads(long)
    assert len(told) == 1
    assert alignment.measure(Batch(images(0)[:2], long)).isfinite().all()
    assert alignment.name.startswith("CLIPScore (")
    digest = sha256_of_file(alexnet)
    assert closeness.name == f"LPIPS (AlexNet, {digest[:8]})"
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


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"metric": "lpip"}, "accepted: lpips, dists"),
        ({"metric": "lpips"}, "accepted: weights, torchvision's file"),
        ({"metric": "prdc", "weights": "x"}, "accepted: none"),
        ({"metric": "lpips", "weights": "x", "better": "lower"}, "better='lower'"),
        ({"metric": "lpips", "weights": "absent.pth"}, "not a file of tensors"),
        ({"metric": "clip-score", "weights": "absent"}, "no config.json"),
        ({"metric": "own_metrics:absent"}, "cannot be imported"),
        ({"metric": "absent_module:f"}, "cannot be imported"),
        (
            {"metric": "own_metrics:brightness", "name": "FID (mine)"},
            r"name='FID \(mine\)' .* is that of another figure",
        ),
        ({"metric": "own_metrics:brightness", "name": "ssim"}, "is that of another figure"),
        ({"metric": "own_metrics:one_number"}, r"the shape \(\)"),
        ({"metric": "own_metrics:broken"}, r"RuntimeError: no\)"),
        ({"metric": "own_metrics:needs_a_word"}, r"with \(images: .*scale: "),
    ],
)
def test_what_is_refused(choice: dict[str, Any], reason: str) -> None:
    with pytest.raises(ElfattError, match=reason) as raised:
        load(**choice).measure(Batch(images(0), PROMPTS))
    assert "\n" not in str(raised.value)


def test_files_that_are_something_else(folder: Path, alexnet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = {key: value for key, value in torch.load(alexnet).items() if key != "features.3.weight"}
    cases: tuple[tuple[str, Any, str], ...] = (
        ("lpips", {"other": torch.zeros(1)}, "of no network of LPIPS; give torchvision's file of AlexNet, VGG16 or"),
        ("lpips", [1], "not a file of tensors"),
        ("lpips", cut, "no 'features.3.weight'"),
        ("lpips", {**cut, "features.3.weight": torch.zeros(2)}, r"a \(2,\) 'features.3"),
        ("dists", torch.load(alexnet), "of no network of DISTS; give torchvision's file of VGG16"),
    )
    for metric, content, reason in cases:
        torch.save(content, folder / "odd.pth")
        with pytest.raises(ElfattError, match=reason):
            load(metric=metric, weights=str(folder / "odd.pth"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None if name == "torchvision" else object())
    load(metric="own_metrics:brightness")
    with pytest.raises(ElfattError, match=r"pip install .*inception"):
        load(metric="lpips", weights=str(alexnet))


def row(folder: Path, name: str, lighter: int, classes: Any = range(40)) -> Images:
    """40 images of one grey each."""
    (folder / name).mkdir(parents=True)
    paths = [folder / name / f"{number}.png" for number in range(40)]
    for number, path in enumerate(paths):
        Image.new("RGB", (8, 8), (100 + 2 * number % 7 + lighter,) * 3).save(path)
    return Images(name, paths, [sha256_of_file(path) for path in paths], classes, ["a cat"] * 40)


def scorer(folder: Path, *choices: MetricChoice) -> Scorer:
    cell = Cell("sd", "SD", "sd", role="baseline")
    return Scorer(Protocol("p", (cell,), metrics=choices), load_metrics(choices, "cpu"), [], folder)


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
    own = MetricChoice("own_metrics:brightness", better=better)
    judge = scorer(tmp_path, own, MetricChoice("own_metrics:moved"))
    light, dark = (judge.measure(row(tmp_path, *each, classes)) for each in (("light", 20), ("dark", 0)))
    found, alone = judge.score(light, dark)["metrics"], judge.score(dark, None)["metrics"]
    assert found["brightness"]["difference"]["value"] == pytest.approx(20)
    assert found["brightness"]["difference"].get("verdict") == verdict
    assert found["moved"]["value"] == pytest.approx(20)
    assert "difference" not in alone["brightness"] and "moved" not in alone
    endless = scorer(tmp_path, MetricChoice("own_metrics:endless"))
    with pytest.raises(ElfattError, match="of image 0 of row 'a' is"):
        endless.measure(row(tmp_path, "a", 0))
    with pytest.raises(ElfattError, match="needs CLIP's features"):
        check_feature_metrics([MetricChoice("cmmd")], [])
