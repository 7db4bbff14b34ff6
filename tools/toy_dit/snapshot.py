"""Export the averaged weights of an unfinished stage: `python -m tools.toy_dit.snapshot CHECKPOINT --out FOLDER`.

`python -m tools.toy_dit.recipe --resume-from FOLDER` goes on from them, if the checkpoints are lost.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from tools.toy_dit import models
from tools.toy_dit.card import RECORD
from tools.toy_dit.denoiser import Denoiser
from tools.toy_dit.export import save_networks
from tools.toy_dit.recipe import describe_images


def load_checkpoint(path: Path, sizes: models.Sizes) -> tuple[Denoiser, dict[str, Any]]:
    """The networks with the averaged weights of a stage's checkpoint, and the stage's state."""
    saved = torch.load(path, map_location="cpu", weights_only=True)
    denoiser = Denoiser(sizes)
    denoiser.load_state_dict(saved["average"])
    return denoiser.requires_grad_(False).eval(), saved["state"]


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and export."""
    parser = argparse.ArgumentParser(prog="python -m tools.toy_dit.snapshot", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="a stage's file under checkpoints/")
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    options = parser.parse_args(arguments)
    denoiser, state = load_checkpoint(options.checkpoint, models.FULL)
    save_networks(models.FULL, denoiser, options.out)
    name = options.checkpoint.stem
    stage = {"steps": state["step"], "seconds": round(state["elapsed"], 1), "curve": state["curve"]}
    record = {"stages": {name: {**stage, "images": describe_images(name, 1)}}}
    (options.out / RECORD).write_text(json.dumps(record) + "\n", encoding="utf-8")
    print(f"step {state['step']} of {name} in {options.out}")


if __name__ == "__main__":
    main()
