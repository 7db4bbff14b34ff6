"""Endless labelled images: one object on a patterned background, drawn with signed distance functions.

The work is batched torch: milliseconds an image on a CPU, thousands a second on a GPU. Lengths are fractions of the
image's side; angles are in radians; the y axis points down. Legend for shapes: n scenes, s the side in pixels.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

COLORS: dict[str, tuple[float, float, float]] = {
    "red": (0.90, 0.12, 0.14),
    "orange": (1.00, 0.55, 0.05),
    "yellow": (1.00, 0.90, 0.15),
    "green": (0.13, 0.62, 0.22),
    "cyan": (0.20, 0.82, 0.90),
    "blue": (0.13, 0.25, 0.85),
    "purple": (0.52, 0.15, 0.72),
    "pink": (1.00, 0.55, 0.78),
}
PALE = 0.8  # a pattern's second tone: this fraction of white in the background's colour
GEOMETRY = ("x", "y", "radius", "rotation", "period", "phase_u", "phase_v", "angle")


def _star(x: Tensor, y: Tensor) -> Tensor:
    sector, outer, inner = math.pi / 5, 1.1, 0.55
    length = torch.hypot(x, y)
    angle = (torch.remainder(torch.atan2(x, -y) + sector, 2 * sector) - sector).abs()
    normal_x, normal_y = inner * math.sin(sector), outer - inner * math.cos(sector)
    distance = (length * angle.cos() - outer) * normal_x + length * angle.sin() * normal_y
    return distance / math.hypot(normal_x, normal_y)


def _heart(x: Tensor, y: Tensor) -> Tensor:
    x, y = x.abs() / 1.75, 0.55 - y / 1.75
    lobe = torch.hypot(x - 0.25, y - 0.75) - math.sqrt(2) / 4
    along = 0.5 * (x + y).clamp_min(0)
    edge = torch.minimum(torch.hypot(x, y - 1), torch.hypot(x - along, y - along)) * torch.sign(x - y)
    return 1.75 * torch.where(x + y > 1, lobe, edge)


def _bar(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(x.abs() - 0.95, y.abs() - 0.34)


_DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "circle": lambda x, y: torch.hypot(x, y) - 0.95,
    "square": lambda x, y: torch.maximum(x.abs(), y.abs()) - 0.8,
    "triangle": lambda x, y: torch.maximum(y, math.sqrt(0.75) * x.abs() - 0.5 * y) - 0.52,
    "star": _star,
    "heart": _heart,
    "cross": lambda x, y: torch.minimum(_bar(x, y), _bar(y, x)),
}


def _cell(u: Tensor) -> Tensor:
    return torch.remainder(u, 1) - 0.5


def _checkered(u: Tensor, v: Tensor) -> Tensor:
    across, along = _cell(u).abs() - 0.25, _cell(v).abs() - 0.25
    return -torch.sign(across * along) * torch.minimum(across.abs(), along.abs())


# Signed distance into a pattern's second tone, in periods.
_TONES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "plain": lambda u, v: torch.full_like(u, -1.0),
    "striped": lambda u, v: _cell(u).abs() - 0.25,
    "checkered": _checkered,
    "dotted": lambda u, v: 0.3 - torch.hypot(_cell(u), _cell(v)),
}
PATTERNS = tuple(_TONES)
SHAPES = tuple(_DISTANCES)
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "shape": SHAPES,
    "color": tuple(COLORS),
    "pattern": PATTERNS,
    "background": tuple(COLORS),
}


def sample_parameters(count: int, generator: torch.Generator, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Draw scenes as tensors, on the generator's device."""
    uniform = torch.rand(count, 12, generator=generator, dtype=torch.float32, device=generator.device)
    counts = [len(SHAPES), len(COLORS), len(PATTERNS), len(COLORS) - 1]
    sizes = torch.tensor(counts, dtype=torch.int64, device=uniform.device)
    labels = (uniform[:, :4] * sizes).long().minimum(sizes - 1)
    labels[:, 3] = (labels[:, 1] + 1 + labels[:, 3]) % len(COLORS)
    x, y, radius, rotation, period, phase_u, phase_v, angle = uniform[:, 4:].unbind(1)
    radius = scale * (0.25 + 0.04 * radius)
    room = 0.2 * (0.5 - 1.12 * radius)
    direction = math.pi / 4 * torch.floor(4 * angle)  # stripes run in four directions, the other patterns upright
    columns = (
        0.5 + room * (2 * x - 1),
        0.5 + room * (2 * y - 1),
        radius,
        0.1 * (rotation - 0.5),
        scale * (0.22 + 0.06 * period),
        phase_u,
        phase_v,
        direction * (labels[:, 2] == PATTERNS.index("striped")),
    )
    return labels, torch.stack(columns, 1)


def sample_prompts(count: int, seed: int) -> list[str]:
    """Draw prompts; the same seed gives the same ones on every machine."""
    labels, _ = sample_parameters(count, torch.Generator().manual_seed(seed))
    names = ([values[i] for values, i in zip(ATTRIBUTES.values(), row, strict=True)] for row in labels.tolist())
    return [describe(*each) for each in names]


def class_labels(classes: Sequence[tuple[str, str, str, str]]) -> Tensor:
    """Label indices `[n, 4]` in the order of `ATTRIBUTES`."""
    rows = [[v.index(x) for v, x in zip(ATTRIBUTES.values(), row, strict=True)] for row in classes]
    return torch.tensor(rows, dtype=torch.int64, device="cpu")


def render_parameters(labels: Tensor, geometry: Tensor, size: int = 256) -> Tensor:
    """Draw scenes given as tensors, as `sample_parameters` returns them."""
    x0, y0, radius, rotation, period, phase_u, phase_v, angle = geometry[:, :, None, None].unbind(1)
    shape, color, pattern, background = labels.unbind(1)
    ticks = (torch.arange(size, device=labels.device, dtype=torch.float32) + 0.5) / size
    x, y = ticks[None, None, :], ticks[None, :, None]
    palette = torch.tensor(list(COLORS.values()), dtype=torch.float32, device=labels.device)
    u, v = _rotate(x - 0.5, y - 0.5, angle)
    tone = _apply(pattern, list(_TONES.values()), u / period + phase_u, v / period + phase_v)
    picture = _blend(palette[background], palette[background] * (1 - PALE) + PALE, _coverage(tone * period * size))
    u, v = _rotate((x - x0) / radius, (y - y0) / radius, rotation)
    distance = _apply(shape, list(_DISTANCES.values()), u, v)
    return _blend(picture, palette[color], _coverage(-distance * radius * size))


def _rotate(x: Tensor, y: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = angle.cos(), angle.sin()
    return x * cos + y * sin, y * cos - x * sin


def _apply(index: Tensor, functions: Sequence[Callable[[Tensor, Tensor], Tensor]], u: Tensor, v: Tensor) -> Tensor:
    """Apply function `index[i]` to the coordinates of scene i."""
    result = torch.empty_like(u)
    for number, function in enumerate(functions):
        chosen = (index == number).nonzero()[:, 0]
        result[chosen] = function(u[chosen], v[chosen])
    return result


def _coverage(distance: Tensor) -> Tensor:
    """Anti-aliased fraction of each pixel that is inside, from the signed distance in pixels."""
    return (0.5 + distance).clamp(0, 1)


def _blend(below: Tensor, above: Tensor, coverage: Tensor) -> Tensor:
    """Lay the colour `above` `[n, 3]` over `below`, a colour or images."""
    below = below if below.dim() == 4 else below[:, :, None, None]
    return below + (above[:, :, None, None] - below) * coverage[:, None]


def describe(shape: str, color: str, pattern: str, background: str) -> str:
    """The prompt for a combination of labels."""
    article = "an" if color[0] in "aeiou" else "a"
    return f"{article} {color} {shape} on a {pattern} {background} background"


CLASSES: tuple[tuple[str, str, str, str], ...] = tuple(
    (shape, color, pattern, background)
    for shape, color, pattern, background in itertools.product(SHAPES, COLORS, PATTERNS, COLORS)
    if color != background
)
CLASS_PROMPTS: tuple[str, ...] = tuple(describe(*labels) for labels in CLASSES)

_GRAMMAR = "a an the of on in with and background high quality photograph photo picture"
VOCABULARY: tuple[str, ...] = tuple(dict.fromkeys([*_GRAMMAR.split(), *SHAPES, *COLORS, *PATTERNS]))


def unknown_words(prompt: str) -> list[str]:
    """Words of a prompt that the toy never saw in training, in order and once each."""
    return [word for word in dict.fromkeys(re.findall(r"\w+", prompt.lower())) if word not in VOCABULARY]
