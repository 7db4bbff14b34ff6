"""What `elfatt-sd generate --explain` writes next to its images."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from elfatt_sd.evaluation.report.plots import to_png
from elfatt_sd.files import write_file
from elfatt_sd.generation import Result, Studio
from elfatt_sd.visualize.asked import Asked
from elfatt_sd.visualize.drawing import draw
from elfatt_sd.visualize.recording import watch


def explain(studio: Studio, results: Sequence[Result], asked: Asked) -> Iterator[Path]:
    """Draw every image of a studio once more, watched, and write what was seen next to it.

    The times and the memory of the images are not those of the watched run, which takes more.
    """
    request = studio.request
    seeds = range(request.seed, request.seed + request.num_images)
    for result, (prompt, seed) in zip(results, itertools.product(request.prompts, seeds), strict=True):
        with studio.patched(), watch(studio.pipe, asked.layer, asked.step, asked.at) as looks:
            image = studio.draw(prompt, seed).frames[0]
        layers = list(dict.fromkeys(look.layer for look in looks))
        for look in looks:
            number = f"-layer-{layers.index(look.layer) + 1}" if len(layers) > 1 else ""
            path = result.path.with_name(f"{result.path.stem}-explained{number}-step-{look.step + 1}.png")
            write_file(path, to_png(draw(look, image)))
            yield path
