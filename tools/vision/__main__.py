"""The miniature of the paper's tables on vision: train, measure the speed, fill the tables of docs/vision.md.

The same command goes on after a stop: what has a file in the folder is not run again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from elfatt_sd.cli.console import DONE, INTERRUPTED, WRONG_USE, complain
from elfatt_sd.errors import ElfattError
from elfatt_sd.files import folder_lock
from elfatt_sd.measure import progress_of
from tools.vision import speed, tables
from tools.vision.models import ROWS
from tools.vision.training import TABLES, TEST_SCENES, Effort, OutOfTime, runs, train_all


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.vision", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="train each row with each seed, and score it on test scenes")
    training.add_argument("--tables", nargs="+", choices=TABLES, default=[*TABLES])
    training.add_argument("--rows", nargs="+", choices=ROWS, default=[*ROWS])
    training.add_argument("--seeds", type=int, default=3, help="of each row, or as many as the table has")
    training.add_argument("--steps", type=int, help="of each training; otherwise what the table has")
    training.add_argument("--scenes", type=int, default=TEST_SCENES, help="number of test scenes")
    timing = commands.add_parser("speed", help="time and memory over the size of the image")
    timing.add_argument("--models", nargs="+", choices=speed.SIZES, default=[*speed.SIZES])
    timing.add_argument("--largest", type=int, default=2**30, help="size, in pixels or tokens")
    table = commands.add_parser("table", help="fill the tables of a page")
    table.add_argument("--page", type=Path, default=Path("docs/vision.md"))
    for command in (training, timing, table):
        command.add_argument("--out", type=Path, required=True, help="folder of the results")
    for command in (training, timing):
        command.add_argument("--minutes", type=float, default=1e6, help="after which nothing further is begun")
        command.add_argument("--threads", type=int, default=torch.get_num_threads())
        command.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    peak = commands.add_parser("peak", help="bytes of a model's first training step, which `speed` asks for")
    for name, kind in {"model": str, "row": str, "size": int, "device": torch.device}.items():
        peak.add_argument(name, type=kind)
    options = parser.parse_args(arguments)
    if options.command == "peak":
        print(speed.peak(options.model, options.row, options.size, options.device))
        return DONE
    try:
        if options.command == "table":
            tables.fill_page(options.page, options.out)
            return DONE
        torch.set_num_threads(options.threads)
        own = options.device, time.monotonic() + 60 * options.minutes
        with folder_lock(options.out), progress_of("runs") as tell:
            if options.command == "train":
                orders = runs(options.tables, options.rows, options.seeds)
                train_all(options.out, orders, Effort(options.steps, options.scenes, *own), tell)
            else:
                speed.measure_all(options.out, options.models, *own, tell, options.largest)
    except (KeyboardInterrupt, OutOfTime) as stop:
        complain("stopped; what was finished stays, and the same command goes on")
        return DONE if isinstance(stop, OutOfTime) else INTERRUPTED
    except ElfattError as error:
        complain(str(error))
        return WRONG_USE
    return DONE


if __name__ == "__main__":
    sys.exit(main())
