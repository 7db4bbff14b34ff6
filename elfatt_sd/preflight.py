"""What can be checked of a command before PyTorch is imported, which takes seconds."""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from elfatt_sd.errors import ElfattError
from elfatt_sd.pipelines import check_names
from elfatt_sd.sizes import (
    LAYER_BYTES,
    SHAPE_VAE,
    SHAPE_WEIGHTS,
    SHAPES,
    TRANSFORMER_NAMES,
    Dimensions,
    dimensions_in,
    memory_of_cpu,
    refuse_if_beyond,
)
from elfatt_sd.toy import EMBEDDED


def check_device(device: str) -> None:
    """Check for a device as far as that is possible without PyTorch.

    Raises:
        ElfattError: it has no known name, or surely is not on this machine.
    """
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
    """Refuse more steps than a directory's scheduler has timesteps, without PyTorch.

    Raises:
        ElfattError: there are more.
    """
    folder = EMBEDDED[model].folder if model in EMBEDDED else Path(model)
    try:
        data = json.loads((folder / "scheduler" / "scheduler_config.json").read_text(encoding="utf-8"))
        most = int(data["num_train_timesteps"])
    except (OSError, ValueError, LookupError, TypeError):  # seen when it is loaded
        return
    if steps is not None and steps > most:
        raise ElfattError(f"steps={steps} is not accepted; give a whole number from 1 to {most}.")


def check_sizes_fit(
    model: str | Path,
    device: str,
    dtype: str,
    sizes: Iterable[tuple[int | None, int | None]],
    batch: int,
    images: int = 1,
) -> None:
    """Refuse images of sizes that are too small for a model or too large for the CPU's memory.

    Only directories and shapes tell their sizes, those of transformers alone by PyTorch; what else there is, is seen
    when the model is loaded.

    Args:
        model: as for `load_pipeline`, or one of `SHAPES`.
        device: likewise; its memory counts if it surely is the CPU.
        dtype: likewise.
        sizes: height and width of each; None is the model's own.
        batch: rows of the denoiser's batch.
        images: that are decoded at once; 0 where none is.

    Raises:
        ElfattError: a size is refused.
    """
    name = str(model)
    known = _dimensions(name)
    if known is None:
        return
    on_cpu = device == "cpu" or (device == "auto" and lacks_cuda() and sys.platform != "darwin")
    each = 4 if str(dtype).removeprefix("torch.") in ("auto", "float32", "fp32") else 2
    for height, width in sizes:
        known.check(height, width)
        if on_cpu:
            size = known.size(height, width)
            need = known.memory(size, batch, each, images=images) + SHAPE_WEIGHTS.get(name, 0) * each
            refuse_if_beyond(size, need, "cpu", memory_of_cpu(), max(images, batch // 2))


def _dimensions(name: str) -> Dimensions | None:
    """Return the dimensions of a shape, an embedded pipeline or a directory; None where it does not tell them."""
    if name in SHAPES:
        return Dimensions.of(SHAPES[name], SHAPE_VAE)
    if name in TRANSFORMER_NAMES:
        from elfatt_sd.shapes import dimensions_of_transformer

        return dimensions_of_transformer(name)
    return dimensions_in(EMBEDDED[name].folder if name in EMBEDDED else Path(name))


def check_layers_fit(sides: Iterable[int], batch: int) -> None:
    """Refuse grids whose single layer no memory of this machine holds, without PyTorch; see `sizes.LAYER_BYTES`.

    Args:
        sides: of square grids, in tokens.
        batch: rows.

    Raises:
        ElfattError: a grid is refused.
    """
    for side in sides:
        need, (memory, _) = LAYER_BYTES * batch * side**2, memory_of_cpu()
        if lacks_cuda() and need > memory:
            raise ElfattError(
                f"tokens={side**2}, batch={batch} is not accepted; a layer needs about {need / 2**30:,.0f} GiB of "
                f"memory (estimated), and cpu has {memory / 2**30:.0f} GiB."
            )
