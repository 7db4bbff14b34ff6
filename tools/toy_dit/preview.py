"""Look at a model in training: `python -m tools.toy_dit.preview CHECKPOINT --out DIR` draws and classifies.

It draws on the grid that a stage trains on, which no call of `FluxPipeline` can do: tokens of a coarse grid carry the
coordinates of the finest.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from elfatt_sd.toy import TOY
from elfatt_sd.toy.features import load_feature_extractor
from elfatt_sd.toy.renderer import ATTRIBUTES, class_labels
from tools.toy.models import SCALING
from tools.toy.quality import by_attribute, draw_classes, save_sheet, to_bytes
from tools.toy_dit import models
from tools.toy_dit.denoiser import Denoiser
from tools.toy_dit.recipe import Words, half_is_faster, load_words, shift
from tools.toy_dit.snapshot import load_checkpoint

CLASSIFIER_SIDE = 128  # of the images that the classifier's convolutions see


@torch.no_grad()
def sample(
    denoiser: Denoiser,
    words: Words,
    labels: Tensor,
    coarse: int,
    steps: int,
    seed: int,
    factor: float,
    keys: int | None,
) -> Tensor:
    """Draw latents `[n, 4, side, side]` of `labels` `[n, 4]` with Euler steps, on a grid of 1/`coarse` of the side.

    Args:
        denoiser: the networks.
        words: the encoded prompts.
        labels: what to draw.
        coarse: the finest grid's side divided by this grid's side.
        steps: number of Euler steps.
        seed: of the noise, and of the choice of keys.
        factor: shift of the timesteps towards noise.
        keys: rows and columns of image keys in attention, or all.
    """
    generator = torch.Generator().manual_seed(seed)
    side = 2 * denoiser.grid // coarse
    latents = torch.randn(len(labels), 4, side, side, generator=generator)
    tokens, clip_tokens = words.full(labels)
    told = shift(torch.linspace(1, 0, steps + 1), factor)
    times = shift(told, 1 / coarse)
    for i in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=half_is_faster(torch.device("cpu"))):
            time = told[i].expand(len(labels))
            velocity = denoiser(latents, time, tokens, clip_tokens, keys=keys, generator=generator)
        latents = latents + (times[i + 1] - times[i]) * velocity.float()
    return latents


@torch.no_grad()
def decode(latents: Tensor) -> Tensor:
    """Images `[n, 3, 4 side, 4 side]` in [0, 1] of latents `[n, 4, side, side]`."""
    import diffusers

    loader: Any = diffusers.AutoencoderKL
    vae = loader.from_pretrained(TOY / "vae")
    images = torch.cat([vae.decode(part / SCALING).sample for part in torch.split(latents, 4)])
    return (images / 2 + 0.5).clamp(0, 1)


def accuracy(images: Tensor, labels: Tensor) -> dict[str, float]:
    """Fraction of images `[n, 3, s, s]` in [0, 1] that the classifier reads as `labels` `[n, 4]`, per attribute."""
    classifier = load_feature_extractor()
    scores = classifier.scores(classifier.features(functional.adaptive_avg_pool2d(images, CLASSIFIER_SIDE)))
    return by_attribute(torch.stack([scores[name].argmax(1) for name in ATTRIBUTES], 1) == labels)


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line, draw, and print the accuracy."""
    parser = argparse.ArgumentParser(prog="python -m tools.toy_dit.preview", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="a stage's file under checkpoints/")
    parser.add_argument("--out", type=Path, required=True, help="folder of the sheet")
    parser.add_argument("--coarse", type=int, default=1, help="the finest grid's side divided by the grid's side")
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shift", type=float, default=models.SHIFT)
    parser.add_argument("--keys", type=int, help="rows and columns of image keys (default: all)")
    options = parser.parse_args(arguments)
    denoiser, state = load_checkpoint(options.checkpoint, models.FULL)
    words = load_words(models.FULL, options.out / "tokenizer_2", torch.device("cpu"))
    labels = class_labels(draw_classes(options.count, options.seed))
    parts = [
        sample(denoiser, words, part, options.coarse, options.steps, options.seed + i, options.shift, options.keys)
        for i, part in enumerate(torch.split(labels, 16))
    ]
    images = decode(torch.cat(parts))
    path = options.out / f"{options.checkpoint.stem}-{options.coarse}.png"
    save_sheet(to_bytes(images), path)
    print(state["step"], accuracy(images, labels), path)


if __name__ == "__main__":
    main()
