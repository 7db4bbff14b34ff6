"""Keep what a finished run found, without its images, in a folder to commit: `python -m tools.publish RUN`.

`python -m tools.pages eval PAGE` fills pages from there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from elfatt_sd.cli.console import DONE, FAILURE, WRONG_USE, complain
from elfatt_sd.errors import ElfattError, ElfattFailure
from elfatt_sd.evaluation.report.data import Results, load_results
from elfatt_sd.evaluation.report.page import replace_files, report_files
from elfatt_sd.evaluation.run import RESULTS_FILE, clear_disk_errors
from elfatt_sd.files import is_full, is_plain_name, write_json

MOST_BYTES = 5_000_000  # of a run that is committed


def publish(results: Results, folder: Path, *, page: bool = True) -> Path:
    """Write results, tables and plots of a run to `folder/NAME`, all from the same results.

    What an earlier publication left there and this one does not have is removed.

    Args:
        results: of a run.
        folder: of all published results.
        page: write the report's page, too, which holds images.

    Returns:
        The folder of the run's results.

    Raises:
        ElfattError: their name cannot be that of a folder, or the folder holds something else or cannot be written.
        ElfattFailure: no space is left on the disk.
    """
    if not is_plain_name(results.name):
        raise ElfattError(f"{RESULTS_FILE} has the name {results.name!r}, which cannot be that of a folder.")
    target = folder / results.name
    _check_replaceable(target)
    files = report_files(results, page=page)
    with clear_disk_errors(target):
        try:
            write_json(target / RESULTS_FILE, dict(results.data))
        except OSError as error:
            if is_full(error):
                raise
            raise ElfattError(f"{target} cannot be written: {error.strerror}.") from error
        replace_files(target, files)
    return target


def _check_replaceable(target: Path) -> None:
    """Refuse a folder that is not an earlier publication, for files of a report are removed there."""
    if target.is_symlink():
        raise ElfattError(f"{target} is a link; give another --out.")
    if target.is_dir() and any(target.iterdir()) and not (target / RESULTS_FILE).is_file():
        raise ElfattError(f"{target} holds something else than published results; give another --out.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.publish", description=__doc__)
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("--out", type=Path, default=Path("eval/results"), help="for all published results; %(default)s")
    parser.add_argument("--no-page", action="store_true", help="leave out the report's page, which holds images")
    options = parser.parse_args(arguments)
    try:
        folder = publish(load_results(options.run), options.out, page=not options.no_page)
    except ElfattError as error:
        complain(str(error))
        return FAILURE if isinstance(error, ElfattFailure) else WRONG_USE
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder} ({size / 1e6:.1f} MB)")
    if size > MOST_BYTES:
        complain(f"more than {MOST_BYTES / 1e6:.0f} MB; --no-page leaves out the page with its images", "warning")
    return DONE


if __name__ == "__main__":
    sys.exit(main())
