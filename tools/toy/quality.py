"""Measure the embedded pipeline: `python -m tools.toy.quality --out DIR` generates, classifies, compares.

It writes `quality.json` (attribute accuracy; `FD-toy` against held-out renders, and that of as many other renders,
the floor) and `sheet.png`, the first 64 images. Images are kept in `DIR/images`: the same command goes on after a
kill, and Ctrl-C measures those that are there.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn import functional

from elfatt_sd.files import write_file
from elfatt_sd.toy import GUIDANCE, TOY
from elfatt_sd.toy.features import ToyClassifier, load_feature_extractor
from elfatt_sd.toy.renderer import ATTRIBUTES, CLASSES, class_labels, describe, render_parameters, sample_parameters
from tools.toy.models import write_json

SIDE = 256  # of the images that the classifier was made for
REFERENCE_SEED, FLOOR_SEED = 9_000_001, 9_000_002
REFERENCES = 1024  # held-out renders that images are compared with


def draw_classes(count: int, seed: int) -> list[tuple[str, str, str, str]]:
    """Random combinations of labels, without repetition as long as there are enough."""
    generator = random.Random(seed)
    classes: list[tuple[str, str, str, str]] = []
    while len(classes) < count:
        classes += generator.sample(CLASSES, min(count - len(classes), len(CLASSES)))
    return classes


def generate(pipeline: Any, prompts: Sequence[str], seed: int, batch: int, **settings: Any) -> Iterator[Tensor]:
    """Yield uint8 images `[n, 3, h, w]` batch by batch; image i has its own generator, seeded by `seed + i`."""
    pipeline.set_progress_bar_config(disable=True)
    for start in range(0, len(prompts), batch):
        part = list(prompts[start : start + batch])
        generators = [torch.Generator().manual_seed(seed + start + i) for i in range(len(part))]
        images = pipeline(part, generator=generators, output_type="np", **settings).images
        yield to_bytes(torch.from_numpy(images).permute(0, 3, 1, 2))


def kept(made: Iterator[Tensor], folder: Path) -> Iterator[Tensor]:
    """Yield uint8 images `[n, 3, h, w]` batch by batch as they come, and keep each batch as a file in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for images in made:
        number = len(list(folder.glob("*.safetensors")))
        write_file(folder / f"{number:04}.safetensors", save({"images": images.contiguous()}))
        yield images


def to_bytes(images: Tensor) -> Tensor:
    """Images in [0, 1] as uint8."""
    return (images.clamp(0, 1) * 255).round().byte()


def renders(count: int, seed: int, size: int) -> Iterator[Tensor]:
    """Yield held-out renders as uint8 `[n, 3, size, size]`."""
    drawn = sample_parameters(count, torch.Generator().manual_seed(seed))
    for labels, geometry in zip(*(torch.split(each, 32) for each in drawn), strict=True):
        yield to_bytes(render_parameters(labels, geometry, size))


def shrink(images: Tensor) -> Tensor:
    """Images `[n, 3, s, s]` (uint8), averaged down to `SIDE` if they are larger."""
    factor = max(1, images.shape[-1] // SIDE)
    return images if factor == 1 else functional.avg_pool2d(images.float(), factor).round().byte()


def predicted(classifier: ToyClassifier, images: Tensor) -> Tensor:
    """Predicted label indices `[n, 4]` in the order of `ATTRIBUTES`."""
    return torch.stack([scores.argmax(1) for scores in classifier.scores(classifier(images)).values()], 1)


def classifier_accuracy(classifier: ToyClassifier, count: int = 512, size: int = 256) -> dict[str, float]:
    """Fraction of held-out renders that the classifier reads right, per attribute."""
    truth, _ = sample_parameters(count, torch.Generator().manual_seed(FLOOR_SEED))
    guesses = torch.cat([predicted(classifier, images) for images in renders(count, FLOOR_SEED, size)])
    return by_attribute(guesses == truth)


def by_attribute(hits: Tensor) -> dict[str, float]:
    """Means of the columns of `hits` `[n, 4]`."""
    return {name: round(value, 4) for name, value in zip(ATTRIBUTES, hits.double().mean(0).tolist(), strict=True)}


def distance(features: Tensor, reference: Tensor) -> float:
    """`FD-toy` between two sets of features `[n, d]`."""
    from benchmarks.coverage import frechet_distance

    first, second = features.double(), reference.double()
    return frechet_distance(first.mean(0), torch.cov(first.T), second.mean(0), torch.cov(second.T))


@torch.no_grad()
def measure(
    pipeline: Any, count: int, steps: int, guidance: float, seed: int, batch: int, folder: Path
) -> tuple[dict[str, Any], Tensor]:
    """Generate and measure.

    Args:
        pipeline: one of the embedded pipelines; larger images than the classifier's are averaged down for it.
        count: images to generate.
        steps: denoising steps.
        guidance: guidance scale.
        seed: of the choice of prompts, and of the first image.
        batch: images at a time.
        folder: keeps the images, one file a batch; those that are there are not made again.

    Returns:
        the figures, and the images `[count, 3, h, w]` (uint8).
    """
    classes = draw_classes(count, seed)
    settings = {"num_inference_steps": steps, "guidance_scale": guidance}
    images = _images(pipeline, [describe(*labels) for labels in classes], seed, batch, folder, **settings)
    asked, count = count, len(images)
    read = torch.cat([shrink(part) for part in torch.split(images, 32)])
    classifier, size = load_feature_extractor(), read.shape[-1]
    hits = torch.cat([predicted(classifier, part) for part in torch.split(read, 32)]) == class_labels(classes)[:count]
    references, floors = renders(REFERENCES, REFERENCE_SEED, size), renders(count, FLOOR_SEED, size)
    target, floor, features = (
        torch.cat([classifier(part) for part in parts]) for parts in (references, floors, torch.split(read, 32))
    )
    figures = {
        "count": count,
        "asked": asked,
        "steps": steps,
        "guidance": guidance,
        "seed": seed,
        "accuracy": by_attribute(hits),
        "mean_accuracy": round(hits.double().mean().item(), 4),
        "all_four_right": round(hits.all(1).double().mean().item(), 4),
        "FD-toy": round(distance(features, target), 3),
        "FD-toy of renders (floor)": round(distance(floor, target), 3),
        "reference_renders": REFERENCES,
        "classifier_accuracy_on_renders": classifier_accuracy(classifier, size=size),
    }
    return figures, images


def _images(pipeline: Any, prompts: Sequence[str], seed: int, batch: int, folder: Path, **settings: Any) -> Tensor:
    """Return the images of prompts; those that a folder keeps are not made again, Ctrl-C returns those that are."""
    parts = [load_file(path)["images"] for path in sorted(folder.glob("*.safetensors"))]
    done = sum(map(len, parts))
    made = kept(generate(pipeline, prompts[done:], seed + done, batch, **settings), folder)
    batches = -(-(len(prompts) - done) // batch)
    try:
        for part in track(made, "generating", total=batches, console=Console(stderr=True)):
            parts.append(part)
    except KeyboardInterrupt:
        if not parts:
            raise
    return torch.cat(parts)[: len(prompts)]


def save_sheet(images: Tensor, path: Path, columns: int = 8, side: int = 112) -> None:
    """Write images `[n, 3, h, w]` (uint8) as one PNG, row by row."""
    from PIL import Image

    sheet = Image.new("RGB", (columns * side, -(-len(images) // columns) * side))
    for i, image in enumerate(images):
        picture = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
        sheet.paste(picture.resize((side, side), Image.Resampling.LANCZOS), (i % columns * side, i // columns * side))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.quantize(255, dither=Image.Dither.NONE).save(path, optimize=True)


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line, measure, and print the figures."""
    import json

    from diffusers import DiffusionPipeline

    parser = argparse.ArgumentParser(prog="python -m tools.toy.quality", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for quality.json and sheet.png")
    parser.add_argument("--pipeline", type=Path, default=TOY, help="diffusers directory (default: the package's)")
    parser.add_argument("--count", type=int, default=256)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--guidance", type=float, default=GUIDANCE)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    loader: Any = DiffusionPipeline
    pipeline = loader.from_pretrained(options.pipeline).to(options.device)
    folder = options.out / f"images-{options.steps}-{options.guidance:g}-{options.seed}"
    figures, images = measure(
        pipeline, options.count, options.steps, options.guidance, options.seed, options.batch, folder
    )
    write_json(options.out / "quality.json", figures)
    save_sheet(images[:64], options.out / "sheet.png")
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
