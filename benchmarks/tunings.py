"""Whether tunings hold on images that they never saw: `python -m benchmarks.tunings toy --out FOLDER`; hours.

Each tuning has seeds and prompts of its own. 64 other images are then drawn with its settings. What was measured of the
layers is shared by all tunings of a model. It goes on where it was stopped.
"""

from __future__ import annotations

import argparse
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


def others(pipe: Any, steps: int, guidance: float, folder: Path) -> list[Image.Image]:
    """Draw images that no tuning saw, and keep them."""
    folder.mkdir(parents=True, exist_ok=True)
    images = []
    for number, prompt in enumerate(sample_prompts(OTHERS, 7)):
        path = folder / f"{number}.png"
        if not path.exists():
            scale = {"guidance_scale": guidance}
            shot = draw(pipe, prompt, FIRST_OTHER + number, steps, scale, lambda *_: None)
            shot.frames[0].save(path.with_suffix(".part"), format="PNG")
            path.with_suffix(".part").replace(path)
        images.append(Image.open(path).convert("RGB"))
    return images


def tuned(pipe: Any, asked: float, number: int, steps: int, guidance: float) -> dict[str, Any]:
    prompts = sample_prompts(48, 100 + number)
    with progress_of("steps") as tell:
        found = tuning.tune(
            pipe, closeness=asked, prompts=prompts, seed=1000 * (number + 1), steps=steps, guidance=guidance,
            presets=False, progress=tell,
        )  # fmt: skip
    return found.to_dict()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="toy, toy-dit, or a folder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--asked", type=float, action="append", help="dB; several times")
    parser.add_argument("--tunings", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--guidance", type=float, default=3.0)
    given = parser.parse_args()
    os.environ["ELFATT_SD_CACHE"] = str(given.out / "cache")
    tuning.Store = lambda key: Store({**key, "samples": None})  # type: ignore[assignment, misc]
    pipe = elfatt_sd.load_pipeline(given.model)
    pipe.set_progress_bar_config(disable=True)
    untouched = others(pipe, given.steps, given.guidance, given.out / "untouched")
    rows: dict[float, list[tuple[dict[str, Any], float]]] = {}
    for number in range(given.tunings):
        for asked in given.asked or (30.0, 35.0, 40.0, 45.0):
            path = given.out / f"{asked:g}-{number}.json"
            if not path.exists():
                write_json(path, tuned(pipe, asked, number, given.steps, given.guidance))
            found = json.loads(path.read_text(encoding="utf-8"))
            mean = math.inf
            if found["proof"] is not None:
                config = PatchConfig.from_dict(found["config"])
                with elfatt_sd.patched(pipe, config):
                    name = f"with-{short_hash(found['config'])}"
                    images = others(pipe, given.steps, given.guidance, given.out / name)
                mean = statistics.fmean(map(psnr, untouched, images))
            rows.setdefault(asked, []).append((found, mean))
            promised = "nothing" if found["proof"] is None else f"{found['proof']['promised']:.1f} dB"
            print(f"{asked:g} dB, tuning {number + 1}: {promised} promised, {mean:.1f} on others", flush=True)
    print("| asked, dB | promised | mean of 64 others | least | held | images of a proof | untouched images in all |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for asked, found_rows in rows.items():
        proved = [(found, mean) for found, mean in found_rows if found["proof"] is not None]
        means = [mean for _, mean in proved]
        held = sum(mean >= asked for _, mean in found_rows)
        counts = [len(found["proof"]["samples"]) for found, _ in proved]
        cost = statistics.median(found["images"] for found, _ in found_rows)
        print(
            f"| {asked:g} | {len(proved)} of {len(found_rows)} | {statistics.fmean(means):.1f} | {min(means):.1f} "
            f"| {held} of {len(found_rows)} | {statistics.median(counts):g} | {cost:.0f} |"
        )


if __name__ == "__main__":
    main()
