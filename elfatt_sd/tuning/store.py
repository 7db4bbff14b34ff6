"""What tuning has measured, on the disk: a run that was stopped goes on where it was."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from PIL import Image
from torch import nn

from elfatt_sd.files import atomic_file, cache_folder, write_json
from elfatt_sd.tuning.runs import Drawn, Sample

Read = TypeVar("Read")


class Store:
    """A folder for one model, size, device and set of versions; where it cannot be written, a warning says so once."""

    def __init__(self, key: Mapping[str, Any]) -> None:
        digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:20]
        self.folder = cache_folder() / "tune" / digest
        self._told = False
        with self._writing():
            write_json(self.folder / "key.json", dict(key))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Go on where a file cannot be written."""
        try:
            yield
        except OSError as error:
            if not self._told:
                text = f"{error.filename}: {error.strerror}; what tuning measures is not kept for the next run"
                warnings.warn(f"elfatt-sd: {text}. ELFATT_SD_CACHE names another folder.", stacklevel=4)
            self._told = True

    def known(self, name: str, make: Callable[[], Any], read: Callable[[Any], Read]) -> Read:
        """Return what is kept under a name; it is made and kept if it is not there, or is damaged."""
        path = self.folder / f"{name}.json"
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, LookupError):
            return read(json.loads(path.read_text(encoding="utf-8")))
        made = make()
        with self._writing():
            write_json(path, made)
        return read(made)

    def drawn(self, sample: Sample, make: Callable[[], Drawn]) -> Drawn:
        """Return the untouched image of a sample; it is made and kept if it is not there."""
        name = hashlib.sha256(f"{sample.seed}/{sample.prompt}".encode()).hexdigest()[:20]
        folder = self.folder / "images" / name
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
            frames = tuple(_read(folder / f"{number}.png") for number in range(facts["frames"]))
            return Drawn(frames, facts["seconds"], facts["peak"])
        made = make()
        with self._writing():
            for number, frame in enumerate(made.frames):
                with atomic_file(folder / f"{number}.png") as file:
                    frame.save(file, format="PNG")
            write_json(folder / "facts.json", {"frames": len(made.frames), "seconds": made.seconds, "peak": made.peak})
        return made

    def clear(self) -> None:
        """Forget everything."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _read(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")


@torch.no_grad()
def fingerprint(module: nn.Module) -> str:
    """Return a hash that changes with the weights of a model: of a few values of every one of them."""
    digest = hashlib.sha256(type(module).__name__.encode())
    for name, weight in module.named_parameters():
        digest.update(f"{name}{tuple(weight.shape)}{weight.dtype}".encode())
        if weight.device.type != "meta":
            some = weight.detach().flatten()[:: max(1, weight.numel() // 8)][:8]
            digest.update(str(some.float().tolist()).encode())
    return digest.hexdigest()[:20]
