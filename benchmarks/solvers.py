"""What a solver does to steps that take over from earlier ones: `python -m benchmarks.solvers --out FOLDER`; an hour.

The toy draws images untouched and with one way of taking over, for each solver. `guidance` runs the rows with the
prompt alone, and takes over what guidance adds to them; no cut of the package does that. It goes on where it stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import elfatt_sd
from elfatt_sd.drawing.compare import psnr
from elfatt_sd.drawing.studio import draw
from elfatt_sd.families.cuts import extrapolated
from elfatt_sd.files import write_json
from elfatt_sd.loading import make_scheduler
from elfatt_sd.measure import progress_of
from elfatt_sd.phases import StepReuse, reused_steps
from elfatt_sd.toy.renderer import sample_prompts

SOLVERS = ("pndm", "ddim", "euler", "dpm++", "unipc")
STEPS, GUIDANCE, FIRST_SEED = 25, 3.0, 5 * 10**6
WAYS: dict[str, dict[str, Any]] = {
    "deep features, last value": {"cut": "shallow-1", "order": 0},
    "deep features, in a line": {"cut": "shallow-1", "order": 1},
    "deep features, in a parabola": {"cut": "shallow-1", "order": 2},
    "deep features, in a line, from the fifth step on": {"cut": "shallow-1", "order": 1, "first": 5},
    "deep features, in a line, to the end": {"cut": "shallow-1", "order": 1, "last": 0},
    "output, last value": {"cut": "output", "order": 0},
    "output, in a line": {"cut": "output", "order": 1},
    "output, in a line, to the end": {"cut": "output", "order": 1, "last": 0},
    "guidance, in a line": {"cut": "guidance", "order": 1},
}


@contextlib.contextmanager
def guidance_taken_over(pipe: Any, reuse: StepReuse) -> Iterator[None]:
    """Run the rows with the prompt alone in the steps that take over."""
    whole, kept, step = pipe.unet.forward, list[Any](), 0

    def forward(sample: Any, timestep: Any, encoder_hidden_states: Any, **given: Any) -> Any:
        nonlocal step
        taken = reused_steps((reuse,), len(pipe.scheduler.timesteps))[step % len(pipe.scheduler.timesteps)]
        half = len(sample) // 2
        if taken:
            output = whole(sample[half:], timestep, encoder_hidden_states[half:], **given)
            added = extrapolated(kept, taken.order, step)[""]
            output = (torch.cat([output[0] - added, output[0]]),)
        else:
            output = whole(sample, timestep, encoder_hidden_states, **given)
            kept.append((step, {"": output[0][half:] - output[0][:half]}))
        step += 1
        return output

    pipe.unet.forward = forward
    try:
        yield
    finally:
        del pipe.unet.forward


def images(pipe: Any, count: int, way: dict[str, Any] | None) -> Iterator[Any]:
    for number, prompt in enumerate(sample_prompts(count, 11)):
        with contextlib.ExitStack() as on:
            if way:
                reuse = StepReuse(**{"every": 2, "first": 9, "last": 4, **way})
                guided = guidance_taken_over(pipe, reuse) if way["cut"] == "guidance" else None
                on.enter_context(guided or elfatt_sd.patched(pipe, "sd", reuse=(reuse,)))
            given = {"guidance_scale": GUIDANCE}
            shot = draw(pipe, prompt, FIRST_SEED + number, STEPS, given, lambda *_: None)
        yield shot.frames[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--solvers", nargs="+", choices=SOLVERS, default=SOLVERS)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS], help="to take over, each in quotes")
    given = parser.parse_args()
    pipe = elfatt_sd.load_pipeline("toy")
    pipe.set_progress_bar_config(disable=True)
    own, found = pipe.scheduler, dict[str, dict[str, list[float]]]()
    with progress_of("solvers") as progress:
        for number, solver in enumerate(given.solvers):
            pipe.scheduler, untouched = make_scheduler(solver, own), None
            for name in given.ways:
                path = given.out / f"{solver}-{name.replace(' ', '-').replace(',', '')}.json"
                if not path.exists() or len(json.loads(path.read_text(encoding="utf-8"))) != given.images:
                    progress(f"{solver}, {name}", number, len(given.solvers))
                    untouched = untouched or list(images(pipe, given.images, None))
                    drawn = images(pipe, given.images, WAYS[name])
                    write_json(path, [*map(psnr, untouched, drawn)])
                found.setdefault(name, {})[solver] = json.loads(path.read_text(encoding="utf-8"))
    print("|", " | ".join(["taken over in every 2nd step from the ninth to the last four", *given.solvers]), "|")
    print("| :--- |", " ---: |" * len(given.solvers))
    for name, rows in found.items():
        cells = (f"{statistics.fmean(row):.1f} ({min(row):.1f})" for row in rows.values())
        print("|", " | ".join([name, *cells]), "|")


if __name__ == "__main__":
    main()
