"""Held-out images of the toy's renderer as a reference."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elfatt_sd.config import ElfattError
from elfatt_sd.files import sha256_of_code

RENDER_SEED = 0x5EED_0F_4EAD  # renders of the reference; training draws from hashes, evaluation from small seeds


class Renders:
    """Held-out images of the toy's renderer, with the classes of the prompts."""

    BLOCK = 1 << 16

    def __init__(self, count: int, classes: Sequence[int]) -> None:
        from elfatt_sd.toy import renderer

        classes = list(classes) or list(range(len(renderer.CLASSES)))
        wrong = [number for number in classes if not 0 <= number < len(renderer.CLASSES)]
        if wrong:
            raise ElfattError(
                f"class {wrong[0]} is not accepted; the toy has classes 0 to {len(renderer.CLASSES) - 1}."
            )
        self.wanted = [classes[index % len(classes)] for index in range(count)]
        self.left_out: Sequence[str] = ()
        source = sha256_of_code([Path(renderer.__file__).read_text(encoding="utf-8")])
        self.fingerprint = ["renders", count, classes[:count], RENDER_SEED, source]

    def __len__(self) -> int:
        return len(self.wanted)

    def load(self, start: int, stop: int) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]] | str]:
        from elfatt_sd.toy.renderer import render_parameters

        labels, geometry = self.scenes
        for index in range(start, stop):
            picture = render_parameters(labels[index : index + 1], geometry[index : index + 1])[0]
            yield (picture.permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()

    @functools.cached_property
    def scenes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Labels and geometry, drawn from the renderer's own distribution; those of the wanted classes are kept."""
        from elfatt_sd.toy import renderer

        numbers = {labels: number for number, labels in enumerate(renderer.CLASSES)}
        open_places: dict[int, list[int]] = {}
        for place in reversed(range(len(self.wanted))):
            open_places.setdefault(self.wanted[place], []).append(place)
        labels = torch.zeros(len(self.wanted), len(renderer.ATTRIBUTES), dtype=torch.int64, device="cpu")
        geometry = torch.zeros(len(self.wanted), len(renderer.GEOMETRY), dtype=torch.float32, device="cpu")
        generator = torch.Generator().manual_seed(RENDER_SEED)
        names = list(renderer.ATTRIBUTES.values())
        while open_places:
            drawn, numbers_drawn = renderer.sample_parameters(self.BLOCK, generator)
            for row, scene in enumerate(drawn.tolist()):
                number = numbers[tuple(values[index] for values, index in zip(names, scene, strict=True))]
                places = open_places.get(number)
                if places:
                    place = places.pop()
                    labels[place], geometry[place] = drawn[row], numbers_drawn[row]
                    if not places:
                        del open_places[number]
        return labels, geometry
