"""What can be checked of a command before PyTorch is imported, which takes seconds."""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from elfatt_sd.errors import ElfattError
from elfatt_sd.families.sizes import SHAPE_VAE, SHAPES, TRANSFORMER_NAMES, Dimensions, dimensions_in
from elfatt_sd.loading import check_names
from elfatt_sd.toy import EMBEDDED


def check_device(device: str) -> None:
    """Check for a device as far as that is possible without PyTorch."""
    check_names(device, "auto")
    kind = device.partition(":")[0]
    if (kind == "cuda" and lacks_cuda()) or (kind == "mps" and sys.platform != "darwin"):
        raise ElfattError(f"device={device!r} is not on this machine; give auto or cpu.")


def lacks_cuda() -> bool:
    """Tell whether this machine surely has no device that PyTorch calls `cuda`: NVIDIA's, or AMD's by ROCm."""
    try:
        build = version("torch")
    except PackageNotFoundError:
        build = ""
    if build.endswith("+cpu") or sys.platform == "darwin":
        return True
    if "rocm" in build or Path("/dev/kfd").exists():
        return False
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return True
    return False


def check_steps(model: str, steps: int | None) -> None:
    """Refuse more steps than a directory's scheduler has timesteps, without PyTorch."""
    folder = EMBEDDED[model].folder if model in EMBEDDED else Path(model)
    try:
        data = json.loads((folder / "scheduler" / "scheduler_config.json").read_text(encoding="utf-8"))
        most = int(data["num_train_timesteps"])
    except (OSError, ValueError, LookupError, TypeError):  # seen when it is loaded
        return
    if steps is not None and steps > most:
        raise ElfattError(f"steps={steps} is not accepted; give a whole number from 1 to {most}.")


def check_sizes(model: str | Path, sizes: Iterable[tuple[int | None, int | None]]) -> None:
    """Refuse sizes that a model cannot draw, as far as a directory or a shape tells them."""
    if (known := _dimensions(str(model))) is not None:
        for height, width in sizes:
            known.check(height, width)


def _dimensions(name: str) -> Dimensions | None:
    if name in SHAPES:
        return Dimensions.of(SHAPES[name], SHAPE_VAE)
    if name in TRANSFORMER_NAMES:
        from elfatt_sd.families.shapes import dimensions_of_transformer

        return dimensions_of_transformer(name)
    return dimensions_in(EMBEDDED[name].folder if name in EMBEDDED else Path(name))
