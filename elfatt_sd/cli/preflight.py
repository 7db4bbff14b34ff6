"""What can be checked of a command before its model is loaded, which may take minutes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from elfatt_sd.errors import ElfattError
from elfatt_sd.families.shapes import dimensions_of_transformer
from elfatt_sd.families.sizes import SHAPE_VAE, SHAPES, TRANSFORMER_NAMES, Dimensions, dimensions_in
from elfatt_sd.toy import EMBEDDED


def check_steps(model: str, steps: int | None) -> None:
    """Refuse more steps than a directory's scheduler has timesteps."""
    try:
        data = json.loads((_folder(model) / "scheduler" / "scheduler_config.json").read_text(encoding="utf-8"))
        most = int(data["num_train_timesteps"])
    except (OSError, ValueError, LookupError, TypeError):  # seen when it is loaded
        return
    if steps is not None and steps > most:
        raise ElfattError(f"steps={steps} is not accepted; give a whole number from 1 to {most}.")


def check_sizes(model: str | Path, sizes: Iterable[tuple[int | None, int | None]]) -> None:
    """Refuse sizes that a model cannot draw, as far as a directory or a shape tells them."""
    name = str(model)
    if name in SHAPES:
        known: Dimensions | None = Dimensions.of(SHAPES[name], SHAPE_VAE)
    else:
        known = dimensions_of_transformer(name) if name in TRANSFORMER_NAMES else dimensions_in(_folder(name))
    if known is not None:
        for height, width in sizes:
            known.check(height, width)


def _folder(model: str) -> Path:
    return EMBEDDED[model].folder if model in EMBEDDED else Path(model)
