"""What these scripts share: options, progress, and the files of results."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import benchmarks.shown  # noqa: F401  (how results of these scripts look)
from elfatt_sd.benchmarking.report import Session, markdown
from elfatt_sd.config import PatchConfig
from elfatt_sd.errors import ElfattError
from elfatt_sd.measure import progress_of


def options(text: str | None, *names: str, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser with `--out` and `--name`, some of the options below, and other defaults of them."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for JSON, a Markdown table and a plot")
    parser.add_argument("--name", help="of these files, if not the benchmark's")
    known: dict[str, dict[str, Any]] = {
        "tokens": {"type": int, "action": "append", "help": "of a square grid; several times"},
        "size": {"action": "append", "help": "of the images, as 1024 or 832x480, width first; several times"},
        "method": {"action": "append", "help": "as for `elfatt-sd bench denoiser`; several times"},
        "batch": {"type": int, "default": 2, "help": "rows"},
        "repeats": {"type": int, "default": 5, "help": "rounds that count"},
        "device": {"default": "auto"},
        "dtype": {"default": "auto"},
    }
    for name in names:
        parser.add_argument(f"--{name}", **known[name])
    parser.set_defaults(**defaults)
    return parser


def methods(texts: list[str] | None) -> list[str | PatchConfig] | None:
    """Return what `--method` names, with the settings that follow its name."""
    from elfatt_sd.cli.bench import read_method

    return None if texts is None else [read_method(text) for text in texts]


def run(chosen: argparse.Namespace, bench: Callable[..., Any], **given: Any) -> None:
    """Run a benchmark, and print and write what it has, also when it is stopped."""
    from elfatt_sd.cli.console import quiet_libraries

    command = shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]])
    session = Session(chosen.out, chosen.name, command)
    quiet_libraries()
    try:
        with progress_of("calls") as session.progress:
            bench(session=session, **given)
    except ElfattError as error:
        sys.exit(str(error))
    finally:
        if session.results.get("rows"):
            print(markdown(session.results))
            session.write()


def keep_rows(session: Session, key: Mapping[str, Any], rows: list[dict[str, Any]]) -> None:
    """Keep rows that were measured as they are, without rounds."""
    session.group(key)["measured"] = [{**key, **row} for row in rows]
    session.work_out()
