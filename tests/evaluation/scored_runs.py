"""A run whose images are renders of the toy, to be scored."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from extractors import regions
from PIL import Image
from small_run import row_of
from torch import Tensor

from elfatt_sd.evaluation import score
from elfatt_sd.evaluation.features import Extractor
from elfatt_sd.evaluation.prompts import run_prompts
from elfatt_sd.evaluation.protocols import Cell, Protocol, Reference
from elfatt_sd.evaluation.reference import Renders

CELLS = (
    Cell("sd", "SD", "sd", role="baseline"),
    Cell("null", "other seeds", "sd", role="null", seed_offset=1000),
    Cell("tome", "ToMe", "tome"),
    Cell("dark", "dark", "elfatt"),
)


COUNT = 32


def protocol(**changes: Any) -> Protocol:
    settings: dict[str, Any] = {
        "labels": "toy",
        "classes": COUNT,
        "images_per_class": 1,
        "extractors": ("toy",),
        "reference": Reference("toy", count=64),
        "height": 256,
        "width": 256,
        "device": "cpu",
    }
    return Protocol("small", CELLS, **{**settings, **changes})


def altered(images: Tensor, cell: str) -> Tensor:
    """What each row makes of the baseline's pictures `[n, h, w, 3]`."""
    if cell == "tome":
        changed = images.clone()
        changed[2, : len(changed[2]) // 4] = 0  # one picture changes much
        changed[5] = (changed[5].int() + 3).clamp(0, 255).to(torch.uint8)  # one a little
        changed[7, 0, 0, 0] ^= 1  # one in a single value
        return changed
    return images // 3 if cell == "dark" else images


def write_run(run_dir: Path, specification: Protocol, stride: int = 4) -> Path:
    """Write a run of renders with every `stride`-th pixel; 1 leaves them as the toy's extractor knows them."""
    classes = [prompt.class_index for prompt in run_prompts(specification)]
    pictures = [image for image in Renders(2 * COUNT, classes).load(0, 2 * COUNT) if not isinstance(image, str)]
    renders = torch.from_numpy(np.stack(pictures))[:, ::stride, ::stride]
    run_dir.mkdir(parents=True)
    data = {"format": 1, "identity": specification.identity, "protocol": specification.to_dict()}
    (run_dir / "run.json").write_text(json.dumps({**data, "created": "today", "environment": {}}))
    for cell in specification.cells:
        rows = renders[COUNT:] if cell.role == "null" else altered(renders[:COUNT], cell.name)
        lines = []
        for index, (pixels, number) in enumerate(zip(rows, classes, strict=True)):
            buffer = io.BytesIO()
            Image.fromarray(pixels.numpy()).save(buffer, "PNG")
            path = row_of(run_dir, cell).image_file(index)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(buffer.getvalue())
            digest = hashlib.sha256(buffer.getvalue()).hexdigest()
            made = {"index": index, "file": path.name, "prompt": "a", "class_index": number, "seed": index}
            lines.append(json.dumps({**made, "sha256": digest}))
        row_of(run_dir, cell).manifest.write_text("\n".join(lines))
    return run_dir


def counting(monkeypatch: pytest.MonkeyPatch) -> list[Extractor]:
    """Score with an extractor that counts its pictures."""
    made: list[Extractor] = []

    def load(spec: str, **_: Any) -> Extractor:
        made.append(regions())
        return made[-1]

    monkeypatch.setattr(score, "load_extractor", load)
    return made
