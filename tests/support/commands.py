"""What tests of the command line share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image
from typer.testing import CliRunner, Result

from elfatt_sd.cli import app

ROOT = Path(__file__).parents[2]
PROMPT = "a red star"


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def draw(model: Path, out: Path, *words: object) -> Result:
    method = () if {"--method", "--config"} & {*words} else ("--method", "elfatt")  # `auto` patches nothing so small
    result = call("generate", PROMPT, "--model", model, "--steps", 2, "--out", out, *method, *words)
    assert result.exit_code == 0, result.output
    return result


def break_decoder(pipe: Any, value: float) -> Any:
    """Let a pipeline draw one value everywhere."""
    import torch  # here, as helps are tested to be told without it

    with torch.no_grad():
        for parameter in pipe.vae.decoder.conv_out.parameters():
            parameter.fill_(value)
    return pipe


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def pixels(path: Path) -> bytes:
    with Image.open(path) as picture:
        return picture.tobytes()
