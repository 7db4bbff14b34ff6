"""Whether tunings hold on images that they never saw: `python -m benchmarks.tunings toy --out FOLDER`; hours.

Each tuning has seeds and prompts of its own. 64 other images are then drawn with its settings. What was measured of the
layers is shared by all tunings of a model. It goes on where it was stopped; images and cache may be lost meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
from pathlib import Path
from typing import Any

from PIL import Image

import elfatt_sd
from elfatt_sd import tuning
from elfatt_sd.config import PatchConfig
from elfatt_sd.drawing.compare import psnr
from elfatt_sd.drawing.studio import draw
from elfatt_sd.files import write_json
from elfatt_sd.measure import progress_of
from elfatt_sd.toy.renderer import sample_prompts
from elfatt_sd.tuning.runs import Store, short_hash

OTHERS, FIRST_OTHER = 64, 10**6  # images, and the seed of the first


def others(pipe: Any, given: argparse.Namespace, folder: Path) -> list[Image.Image]:
    """Draw images that no tuning saw, and keep them."""
    folder.mkdir(parents=True, exist_ok=True)
    images = []
    for number, prompt in enumerate(sample_prompts(OTHERS, 7)):
        path = folder / f"{number}.png"
        if not path.exists():
            inputs = {"guidance_scale": given.guidance, "height": given.size, "width": given.size}
            shot = draw(pipe, prompt, FIRST_OTHER + number, given.steps, inputs, lambda *_: None)
            shot.frames[0].save(path.with_suffix(".part"), format="PNG")
            path.with_suffix(".part").replace(path)
        images.append(Image.open(path).convert("RGB"))
    return images


def row_of(pipe: Any, asked: float, number: int, given: argparse.Namespace) -> dict[str, Any]:
    """Tune, and draw the other images with what was found."""
    prompts = sample_prompts(48, 100 + number)
    run = {"steps": given.steps, "guidance": given.guidance, "height": given.size, "width": given.size}
    with progress_of("steps") as tell:
        tuned = tuning.tune(
            pipe, closeness=asked, prompts=prompts, seed=1000 * (number + 1), presets=False, progress=tell, **run
        )
    found = tuned.to_dict()
    own = given.images / f"{given.model}-{given.size}-{given.steps}-{given.guidance:g}"
    row: dict[str, Any] = {"config": found["config"], "untouched_images": found["images"], "others": []}
    if found["proof"] is not None:
        samples = found["proof"]["samples"]
        row |= {"promised": found["proof"]["promised"], "images": len(samples), "speed": found["proof"]["speed"]}
        with elfatt_sd.patched(pipe, PatchConfig.from_dict(found["config"])):
            images = others(pipe, given, own / f"with-{short_hash(found['config'])}")
        untouched = others(pipe, given, own / "untouched")
        row["others"] = [min(psnr(*pair), 100.0) for pair in zip(untouched, images, strict=True)]
    return row


def lost_to_care(rows: dict[float, list[dict[str, Any]]], asked: float) -> str:
    """Say how much faster settings would be whose images are just as close as asked, on a line through what was found.

    It interpolates the logarithm of the median speed over the mean closeness.
    """
    points = {}
    for each, found in rows.items():
        if proved := [row for row in found if row["others"]]:
            close = statistics.fmean(statistics.fmean(row["others"]) for row in proved)
            points[each] = close, math.log(statistics.median(statistics.median(row["speed"]) for row in proved))
    for (low, fast), (high, slow) in itertools.pairwise(sorted(points.values())):
        if asked in points and low <= asked <= high:
            careless = fast + (slow - fast) * (asked - low) / (high - low)
            return f"{1 - math.exp(points[asked][1] - careless):.1%}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="toy, toy-dit, or a folder")
    parser.add_argument("--out", type=Path, required=True, help="a JSON file for each tuning")
    parser.add_argument("--images", type=Path, required=True, help="folder of images and of tune's cache")
    parser.add_argument("--asked", type=float, action="append", help="dB; several times")
    parser.add_argument("--tunings", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="of these tunings, so that processes can share them")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--size", type=int, help="pixels of a side; the model's own if not given")
    given = parser.parse_args()
    os.environ["ELFATT_SD_CACHE"] = str(given.images / "cache")
    tuning.Store = lambda key: Store({**key, "samples": None})  # type: ignore[assignment, attr-defined]
    pipe, asked = None, given.asked or [30.0, 35.0, 40.0, 45.0]
    rows: dict[float, list[dict[str, Any]]] = {each: [] for each in asked}
    for number, each in itertools.product(range(given.first, given.tunings), asked):
        path = given.out / f"{each:g}-{number}.json"
        if not path.exists():
            if pipe is None:
                pipe = elfatt_sd.load_pipeline(given.model)
                pipe.set_progress_bar_config(disable=True)
            write_json(path, row_of(pipe, each, number, given))
        row = json.loads(path.read_text(encoding="utf-8"))
        rows[each].append(row)
        said = (
            f"{row['promised']:.1f} dB, {statistics.fmean(row['others']):.1f} on others" if row["others"] else "nothing"
        )
        print(f"{each:g} dB, tuning {number + 1}: {said}", flush=True)
    print("| asked, dB | promised | mean of 64 others | least | held | images of a proof | untouched | speed lost |")
    print("|", " ---: |" * 8)
    for each, found in rows.items():
        means = [statistics.fmean(row["others"]) for row in found if row["others"]]
        held = sum(mean >= each for mean in means) + len(found) - len(means)  # nothing promised is nothing broken
        middle = f"{statistics.fmean(means):.1f} | {min(means):.1f}" if means else " | "
        counts = [row["images"] for row in found if row["others"]]
        cost = statistics.median(row["untouched_images"] for row in found)
        print(
            f"| {each:g} | {len(means)} of {len(found)} | {middle} | {held} of {len(found)} "
            f"| {statistics.median(counts or [0]):g} | {cost:.0f} | {lost_to_care(rows, each)} |"
        )
    proved = [row for found in rows.values() for row in found if row["others"]]
    below = sum(row["promised"] <= statistics.fmean(row["others"]) for row in proved)
    costs = [row["untouched_images"] for row in rows[asked[0]]]
    print(f"\nbound below the mean of others: {below} of {len(proved)}", end="; ")
    print(f"first tunings took {min(costs):.0f} to {max(costs):.0f} untouched images")


if __name__ == "__main__":
    main()
