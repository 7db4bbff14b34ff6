"""Scenes with a label for each token, drawn by the renderer of the embedded pipelines.

A token is a square of `TOKEN` pixels. Legend for shapes: n scenes, t tokens in rows from the top.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from elfatt_sd.toy.renderer import COLORS, GEOMETRY, PATTERNS, render_parameters, sample_parameters

TOKEN = 4  # pixels of a token's side
TILE = 4  # tokens of a tile's side
IGNORED = -100  # the label of a token that none is asked of
CUES = ("red", "blue")
_OFF = -9.0  # where an object is that no pixel shows


@dataclass(frozen=True)
class Scenes:
    """Images, and what is asked of them."""

    images: Tensor  # `[n, 3, side, side]`, from -1 to 1
    labels: Tensor  # `[n, t]`, a class or `IGNORED`
    scored: Tensor  # `[n, t]`, tokens whose answer counts in the score
    pattern: Tensor | None = None  # `[n]`, a class of the whole image


def matching(count: int, generator: torch.Generator, side: int = 48) -> Scenes:
    """Four objects on a pattern, one with a black dot: which tokens of the others have the dotted one's colour?

    The dotted one's own tokens, which have it, are learnt as well and do not count.
    """
    images, objects, pattern = _four_objects(count, generator, side)
    labels = torch.where(objects > 0, (objects > 1).long(), IGNORED)
    return Scenes(images, labels, (objects == 1) | (objects == 2), pattern)


def segments(count: int, generator: torch.Generator, side: int = 96) -> Scenes:
    """The same scenes with three classes: background, object of another colour, object of the dotted one's colour."""
    images, objects, _ = _four_objects(count, generator, side)
    return Scenes(images, objects.clamp(max=2), torch.ones_like(objects, dtype=torch.bool))


def _four_objects(count: int, generator: torch.Generator, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return images, what each token shows, and the pattern.

    A token shows 0 nothing, 1 an object of another colour, 2 one of the dotted one's colour, 3 the dotted object. The
    image is four quarters with an object each; the pattern goes on from one quarter to the next.
    """
    shared, place = (each[:, None].repeat(1, 4, 1) for each in sample_parameters(count, generator))
    labels, own = (each.view(count, 4, -1) for each in sample_parameters(4 * count, generator))
    dotted = torch.randint(4, (count, 1), generator=generator)
    same = torch.rand(count, 4, generator=generator) < 0.5
    same.scatter_(1, dotted, True)
    colour, ground = shared[:, :1, 1], shared[:, :1, 3]
    other = 1 + torch.randint(len(COLORS) - 2, (count, 1), generator=generator)
    other = (colour + other + (other >= (ground - colour) % len(COLORS))) % len(COLORS)  # neither of the two
    labels = torch.stack((labels[..., 0], torch.where(same, colour, other), shared[..., 2], shared[..., 3]), 2)
    across, along = torch.tensor([-0.25, 0.25, -0.25, 0.25]), torch.tensor([-0.25, -0.25, 0.25, 0.25])
    period, angle = place[..., GEOMETRY.index("period")], place[..., GEOMETRY.index("angle")]
    moved_u = (across * angle.cos() + along * angle.sin()) / period
    moved_v = (along * angle.cos() - across * angle.sin()) / period
    place = torch.stack(
        (*own[..., :4].unbind(2), 2 * period, place[..., 5] + moved_u, place[..., 6] + moved_v, angle), 2
    )
    bare = place.clone()
    bare[..., :2] = _OFF
    quarters = [render_parameters(labels.flatten(0, 1), each.flatten(0, 1), side // 2) for each in (place, bare)]
    shown = (quarters[0] - quarters[1]).abs().amax(1) > 0.1
    ticks = (torch.arange(side // 2) + 0.5) / (side // 2)
    x, y = (place[..., each].flatten()[:, None, None] for each in (0, 1))
    dots = torch.hypot(ticks[None, None] - x, ticks[None, :, None] - y) < 0.08
    dots &= (torch.arange(4) == dotted).flatten()[:, None, None]
    images = _joined(quarters[0] * ~dots[:, None], 2)
    kinds = (1 + same.long()).scatter(1, dotted, 3).flatten()[:, None, None]
    covered = torch.nn.functional.avg_pool2d(shown[:, None].float(), TOKEN) > 0.5
    return images * 2 - 1, _joined(covered * kinds[:, None], 2).flatten(1), shared[:, 0, 2]


def partners(count: int, generator: torch.Generator, tiles: int = 3, shift: int = 0) -> Scenes:
    """A floor of tiles: in which direction, or in which phase, is the stripe of a token's partner?

    A tile has a striped square in each token, in eight colours, each twice: these two are partners. One tile shows an
    object instead. A red one asks for the direction of the partner's stripe, a blue one for its phase. Tokens whose
    partner has one answer to both are not scored: who does not see the object is right as often as wrong there. So is
    who does not see the partner, because all tiles have the same colours, and directions and phases are by chance.

    Args:
        count: of scenes.
        generator: draws them.
        tiles: of a side.
        shift: tokens by which the floor is shifted, so that windows cut the tiles; tiles cut by the edge do not count.
    """
    cells, squares = tiles * tiles, TILE * TILE
    order = torch.rand(count, cells, squares, generator=generator).argsort(2)
    rank = order.argsort(2)
    partner = order.gather(2, rank ^ 1)
    direction, phase = torch.randint(2, (2, count, cells, squares), generator=generator)
    labels = torch.zeros(count, cells, squares, 4, dtype=torch.int64)
    labels[..., 2], labels[..., 3] = PATTERNS.index("striped"), rank // 2
    place = torch.zeros(count, cells, squares, len(GEOMETRY))
    given = {"x": _OFF, "y": _OFF, "radius": 1.0, "period": 1.0, "phase_u": phase / 2, "angle": direction * math.pi / 2}
    for name, value in given.items():
        place[..., GEOMETRY.index(name)] = value
    glyphs = render_parameters(labels.flatten(0, 2), place.flatten(0, 2), TOKEN)
    floor = _joined(glyphs, TILE).view(count, cells, 3, TILE * TOKEN, TILE * TOKEN)
    cue = torch.randint(2, (count,), generator=generator)
    drawn, where = sample_parameters(count, generator, scale=1.5)
    drawn[:, 1] = torch.tensor([[*COLORS].index(name) for name in CUES])[cue]
    drawn[:, 2:] = torch.tensor([PATTERNS.index("plain"), [*COLORS].index("yellow")])
    rows, cell = torch.arange(count), torch.randint(cells, (count,), generator=generator)
    floor[rows, cell] = render_parameters(drawn, where, TILE * TOKEN)
    first, second = direction.gather(2, partner), phase.gather(2, partner)
    answers = torch.where(cue[:, None, None] == 0, first, second)
    answers[rows, cell] = IGNORED
    whole = torch.arange(cells) // tiles < tiles - 1
    whole = (whole & (torch.arange(cells) % tiles < tiles - 1))[:, None] if shift else torch.tensor(True)
    answers = torch.where(whole, answers, IGNORED)
    scored = (first != second) & (answers != IGNORED)
    images = _joined(floor.flatten(0, 1), tiles) * 2 - 1
    answers, scored = (
        _joined(each.view(-1, 1, TILE, TILE), tiles).view(count, tiles * TILE, -1) for each in (answers, scored)
    )
    if shift:
        images = images.roll((shift * TOKEN, shift * TOKEN), (2, 3))
        answers, scored = (each.roll((shift, shift), (1, 2)) for each in (answers, scored))
    return Scenes(images, answers.flatten(1), scored.flatten(1), cue)


def _joined(pieces: Tensor, side: int) -> Tensor:
    """Lay `side * side` pieces `[n * side * side, c, h, w]` out as images, in rows from the top."""
    _, channels, height, width = pieces.shape
    grid = pieces.view(-1, side, side, channels, height, width)
    return grid.permute(0, 3, 1, 4, 2, 5).reshape(-1, channels, side * height, side * width)
