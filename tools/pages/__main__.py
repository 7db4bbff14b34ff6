"""Put committed results into a page: `python -m tools.pages bench docs/performance.md`, or `eval docs/quality.md`.

The tables and plots of benchmarks are made again; those of a run are as `python -m tools.publish` left them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from elfatt_sd.cli.console import DONE, FAILURE, WRONG_USE, complain
from elfatt_sd.errors import ElfattError
from elfatt_sd.files import write_file
from tools.pages import bench, evaluation
from tools.pages.blocks import check_results

RESULTS = {"bench": Path("benchmarks/results"), "eval": Path("eval/results")}


def fill(kind: str, page: Path, results: Path, *, check: bool) -> bool:
    """Fill a page and write its plots, or only look.

    Args:
        kind: of the results, `bench` or `eval`.
        page: to fill.
        results: their folder.
        check: write nothing.

    Returns:
        Whether the page was in step with the results.

    Raises:
        ElfattError: the page cannot be read, or as for the two `fill_page`.
    """
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise ElfattError(f"{page} cannot be read: {error.strerror}.") from error
    check_results(results)
    plots: dict[Path, bytes] = {}
    if kind == "bench":
        if not check:
            bench.render(results)
        filled = bench.fill_page(text, results, page.parent)
    else:
        filled, plots = evaluation.fill_page(text, results, page.parent)
    for path, content in {page: filled.encode(), **plots}.items() if not check else ():
        write_file(path, content)
    return filled == text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.pages", description=__doc__)
    parser.add_argument("kind", choices=RESULTS, help="of the results")
    parser.add_argument("page", type=Path, help="with markers '<!-- bench NAME -->' or '<!-- eval NAME PLOT ... -->'")
    parser.add_argument("--results", type=Path, help="folder of the results; benchmarks/results or eval/results")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is out of step")
    options = parser.parse_args(arguments)
    results = options.results or RESULTS[options.kind]
    try:
        in_step = fill(options.kind, options.page, results, check=options.check)
    except ElfattError as error:
        complain(str(error))
        return WRONG_USE
    if options.check and not in_step:
        words = f"python -m tools.pages {options.kind} {options.page} --results {results}"
        complain(f"{options.page} is not in step with {results}; {words} mends it")
        return FAILURE
    return DONE


if __name__ == "__main__":
    sys.exit(main())
