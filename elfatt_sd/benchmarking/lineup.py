"""What a benchmark is asked for, checked without PyTorch: methods with their settings, and sizes of grids."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

from elfatt_sd import checks
from elfatt_sd.benchmarking.names import PEER
from elfatt_sd.benchmarking.presets import ALONE, MERGING
from elfatt_sd.config import ElfattError, PatchConfig
from elfatt_sd.methods import attention_named
from elfatt_sd.peers import PEERS, check_settings
from elfatt_sd.presets import method_named, method_names

SAVED = ".json"  # the end of a saved configuration's name
Size = int | str  # of an image in pixels: the side of a square, or `WIDTHxHEIGHT`
PEER_SETTINGS = ("levels", "max_downsample", "ratio", "stride", "use_rand")


def check_method(name: str) -> None:
    """Check the name of a method to time."""
    if name.endswith(SAVED):
        PatchConfig.load(name)
    elif ":" in name:
        attention_named(name)
    else:
        checks.choice("method", name, [*method_names(), *PEERS, *ALONE])


def varied(method: str, **settings: Any) -> PatchConfig:
    """Return a method with other settings, and these in its name: `elfatt-fast:levels=2`."""
    if method == PEER and (unknown := sorted(settings.keys() - {*PEER_SETTINGS})):
        raise ElfattError(f"setting {unknown[0]!r} of {PEER} is not known; accepted: {', '.join(PEER_SETTINGS)}.")
    changes = ",".join(f"{name}={json.dumps(value)}" for name, value in settings.items())
    config = named(method)
    if method in PEERS and method != PEER:
        check_settings(method, settings)
    else:
        config = config.with_settings(**settings)
    return config.renamed(f"{config.method}:{changes}" if changes else config.method)


def peer_settings(method: str) -> dict[str, Any]:
    changes = method.partition(":")[2]
    pairs = (change.split("=", 1) for change in changes.split(",") if change)
    return {name: json.loads(value) for name, value in pairs}


def named(method: str) -> PatchConfig:
    """Return a preset, a peer, an attention after exact early steps, or a saved configuration."""
    if method == PEER:
        return dataclasses.replace(PatchConfig.preset(MERGING), method=PEER)
    if method in PEERS:
        return PatchConfig(method)
    if method in ALONE:
        return ALONE[method]
    if method.endswith(SAVED):
        return dataclasses.replace(PatchConfig.load(method), method=Path(method).stem)
    check_method(method)
    return method_named(method)


def read_size(text: str) -> Size:
    """Read a size in pixels: `1024`, or `832x480`, width first."""
    found = re.fullmatch(r"(\d{1,18})(?:x(\d{1,18}))?", text.strip(), re.ASCII)
    numbers = [int(number) for number in found.groups() if number] if found else [0]
    if min(numbers) <= 0 or any(number % 8 for number in numbers):
        raise ElfattError(f"size={text} is not accepted; give a positive multiple of 8, or two as in 832x480.")
    return numbers[0] if len(numbers) == 1 else "x".join(map(str, numbers))


def height_and_width(size: Size) -> tuple[int, int]:
    width, _, height = str(size).partition("x")
    return int(height or width), int(width)


def as_size(height: int, width: int) -> Size:
    return width if height == width else f"{width}x{height}"


def grid_side(tokens: int) -> int:
    """Return the side of a square grid."""
    side = math.isqrt(max(tokens, 0))
    if tokens < 1 or side * side != tokens:
        raise ElfattError(f"tokens={tokens} is not accepted; give the number of tokens of a square grid.")
    return side
