"""What a step costs that takes over from earlier ones, on large transformers with random weights and few blocks.

python -m benchmarks.reuse_shapes --shape flux --size 1024x1024 --dtype float32 --method sd --out benchmarks/results

A run's steps are timed one after the other: every second one takes over. In brackets: the least and the greatest ratio
of a step to the one before it. Next to it stands what the plan says of the whole model.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch

from benchmarks import common
from elfatt_sd.attention.ordering import Grid
from elfatt_sd.benchmarking import Model, make_model
from elfatt_sd.benchmarking.variants import height_and_width, named
from elfatt_sd.devices import describe_machine
from elfatt_sd.families import family_of
from elfatt_sd.families.base import FRACTION
from elfatt_sd.families.shapes import SHAPES, Blueprint, empty_model
from elfatt_sd.files import write_json
from elfatt_sd.loading import pick_device, pick_dtype
from elfatt_sd.measure import Spread, progress_of, timed
from elfatt_sd.patch import patched
from elfatt_sd.phases import StepReuse, reused_steps

FEW = {"flux": {"num_layers": 2, "num_single_layers": 2}, "wan-1.3b": {"num_layers": 3}}
CUTS = ("blocks-1-0", "output")


def timesteps(made: Model, steps: int) -> torch.Tensor:
    """Return a schedule in the unit of the model's timesteps; a call with one of them is known by its place."""
    unit = getattr(family_of(made.unet), "unit", None)
    parameter = next(made.unet.parameters())
    return torch.linspace(1.0, 1.0 / steps, steps, device=parameter.device) * (1.0 if unit == FRACTION else 1000.0)


def step_times(made: Model, inputs: dict[str, Any], schedule: torch.Tensor, device: torch.device) -> list[float]:
    times = []
    for timestep in schedule:
        given = {**inputs, "timestep": timestep.expand(inputs["timestep"].shape)}
        times.append(timed(torch.inference_mode()(lambda given=given: made.unet(**given)), device))
    return times


def main() -> None:
    parser = common.options(__doc__, "device", "dtype", dtype="bfloat16")
    parser.add_argument("--shape", choices=sorted(FEW), required=True)
    parser.add_argument("--size", required=True, help="as 832x480, width first")
    parser.add_argument("--method", action="append", help="of the steps that compute everything; several times")
    parser.add_argument("--cut", action="append", choices=CUTS, help="that is timed; several times, both if not given")
    parser.add_argument("--latent-frames", type=int, help="of a video; the model's own if not given")
    parser.add_argument("--repeats", type=int, default=3, help="pairs of steps that count")
    chosen = parser.parse_args()
    device = pick_device(chosen.device)
    SHAPES["few"] = dataclasses.replace(SHAPES[chosen.shape], few=FEW[chosen.shape])
    made = make_model("few", device, pick_dtype(chosen.dtype, device))
    whole, family = empty_model(SHAPES[chosen.shape]), family_of(made.unet)
    height, width = height_and_width(chosen.size)
    frames, parameter = chosen.latent_frames or family.latent(made.unet).frames, next(made.unet.parameters())
    grid = family.grid(made.unet, Grid(frames, height // made.scale, width // made.scale))
    inputs = family.arguments(made.unet, grid, 1, lambda *sizes: torch.randn(sizes).to(parameter))
    steps = 2 * chosen.repeats + 3
    schedule = timesteps(made, steps)
    results: dict[str, Any] = {"shape": chosen.shape, "size": chosen.size, "frames": frames}
    results |= {"blocks": FEW[chosen.shape], "rows": [], "machine": describe_machine(device)}
    pairs = list(itertools.product(chosen.method or ["sd", "elfatt-fast"], chosen.cut or CUTS))
    with progress_of("runs") as progress:
        for number, (method, cut) in enumerate(pairs):
            progress(chosen.shape, number, len(pairs))
            reuse = (StepReuse(cut=cut, every=2, order=1, first=2, last=1),)
            with patched(made.unet, dataclasses.replace(named(method), reuse=reuse)):
                times = step_times(made, inputs, schedule, device)
            taking = [step for step, each in enumerate(reused_steps(reuse, steps)) if each][-chosen.repeats :]
            ratio = Spread.over(times[step - 1] / times[step] for step in taking)
            row = {"method": method, "cut": cut, "seconds": times, "taking": taking, "ratio": ratio._asdict()}
            row["these_blocks"] = [Blueprint.of(made.unet).taking_over(grid, each) for each in ("", cut)]
            row["whole_model"] = [Blueprint.of(whole).taking_over(grid, each) for each in ("", cut)]
            results["rows"].append(row)
            counts = f"of these blocks {row['these_blocks']}, of all {row['whole_model']}"
            print(f"{method}, {cut}: {ratio.words()}, multiply-adds and values kept: {counts}", flush=True)
            if chosen.out:
                write_json(chosen.out / f"{chosen.name or f'reuse-{chosen.shape}'}.json", results)


if __name__ == "__main__":
    main()
