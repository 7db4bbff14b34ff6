"""Run diffusers' own fast tests twice, untouched and with every UNet pipeline patched, and compare.

    python tools/diffusers_tests.py --checkout ../diffusers [--method elfatt-fast] [-k "save_load and not slow"]

Of the tests of pipelines, UNets and LoRA that have to do with UNets, those that pass untouched are run again. A failure
is of values, where numbers differ from those that a test expects, or structural. Structural failures are never
accepted; tests whose values may differ are listed in `diffusers_tests_known.txt`. The exit code is 0 if nothing else
failed, 1 if something did, and 2 for wrong use.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from elfatt_sd import METHODS, ElfattError  # noqa: E402

SUITES = {"pipelines": "tests/pipelines", "UNets": "tests/models/unets", "LoRA": "tests/lora"}
KNOWN = HERE / "diffusers_tests_known.txt"
SECONDS = 600  # of a test, after which it has failed; needs pytest-timeout
_OTHERS = ("flax", "onnx")  # runtimes that have no UNet of PyTorch


@dataclass
class Ending:
    """How a test ended.

    Attributes:
        outcome: `passed`, `failed`, or `skipped`.
        kind: of a failure: `value` or `structural`.
        message: of a failure, in one line.
        patched: pipelines or models that were patched in it.
        refused: those that the method does not know a layer of.
    """

    outcome: str = "skipped"
    kind: str = ""
    message: str = ""
    patched: int = 0
    refused: int = 0


def find_tests(checkout: Path) -> dict[str, list[str]]:
    """Return the test files of each suite that have to do with UNets, as paths in the checkout.

    Raises:
        ElfattError: there is none.
    """
    found = {name: sorted(map(str, _files(checkout, folder))) for name, folder in SUITES.items()}
    if not any(found.values()):
        raise ElfattError(f"checkout={str(checkout)!r} has no tests of UNets; give a checkout of diffusers.")
    return found


def _files(checkout: Path, folder: str) -> list[Path]:
    files = [path for path in (checkout / folder).rglob("test_*.py") if not any(word in path.name for word in _OTHERS)]
    return [path.relative_to(checkout) for path in files if "UNet" in path.read_text(encoding="utf-8")]


def run_tests(options: argparse.Namespace, name: str, files: Sequence[str], extra: Sequence[str]) -> dict[str, Ending]:
    """Run pytest in the checkout, and return how each test ended.

    Args:
        options: of the command line.
        name: of the log and of the results in the folder `out`.
        files: tests.
        extra: more options of pytest.
    """
    results, log = options.out / f"{name}.jsonl", options.out / f"{name}.log"
    results.unlink(missing_ok=True)
    words = ["-q", "-p", "no:cacheprovider", "-p", "diffusers_tests_plugin", f"--elfatt-results={results}", *extra]
    words += ["-k", options.k] * bool(options.k) + ["--elfatt-offline"] * options.offline
    words += ["-n", str(options.jobs)] * (options.jobs > 1)
    words += [f"--timeout={SECONDS}"] * (importlib.util.find_spec("pytest_timeout") is not None)
    with open(log, "wb") as file:
        command = [sys.executable, "-m", "pytest", *words, *files]
        subprocess.run(command, cwd=options.checkout, env=_environment(options), stdout=file, stderr=file, check=False)
    return read_endings(results)


def _environment(options: argparse.Namespace) -> dict[str, str]:
    """Return an environment in which the checkout's diffusers, if it has its source, and this elfatt-sd are found."""
    places = [options.checkout / "src", HERE, HERE.parent, os.environ.get("PYTHONPATH", "")]
    offline = {"HF_HUB_OFFLINE": "1"} if options.offline else {}
    return {**os.environ, **offline, "PYTHONPATH": os.pathsep.join(str(place) for place in places if str(place))}


def read_endings(results: Path) -> dict[str, Ending]:
    """Join the lines of a test's setup, call and teardown."""
    endings: dict[str, Ending] = {}
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    for line in map(json.loads, lines):
        ending = endings.setdefault(line["test"], Ending())
        if line["outcome"] == "failed":
            ending.outcome, ending.kind = "failed", line.get("kind", "structural")
            ending.message = line.get("message", f"failed in {line['when']}")
        elif line["when"] == "call" and ending.outcome != "failed":
            ending.outcome = line["outcome"]
        ending.patched = max(ending.patched, line.get("patched", 0))
        ending.refused = max(ending.refused, len(line.get("refused", ())))
    return endings


def read_known(path: Path) -> list[str]:
    """Return the patterns of tests whose values may differ: one a line, and what follows ` # ` says why.

    Raises:
        ElfattError: there is no such file.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ElfattError(f"known={str(path)!r} cannot be read: {error.strerror}.") from error
    return [line.partition(" # ")[0].strip() for line in lines if line.strip() and not line.startswith("#")]


@dataclass
class Comparison:
    """Both runs of the same tests.

    Attributes:
        untouched: how each test ended.
        patched: how those ended that pass untouched; one that is missing was never finished.
        known: patterns of tests whose values may differ.
    """

    untouched: Mapping[str, Ending]
    patched: Mapping[str, Ending]
    known: Sequence[str]

    @property
    def passing(self) -> list[str]:
        """Tests that pass untouched."""
        return [test for test, ending in self.untouched.items() if ending.outcome == "passed"]

    def failures(self, kind: str) -> dict[str, str]:
        """Return the tests that fail in one way once patched, with their messages."""
        endings = {test: self.patched.get(test, _UNFINISHED) for test in self.passing}
        ended = {test: _UNFINISHED if end.outcome == "skipped" else end for test, end in endings.items()}
        return {test: end.message for test, end in ended.items() if end.outcome == "failed" and end.kind == kind}

    def is_known(self, test: str) -> bool:
        """Tell whether the values of a test may differ."""
        return any(fnmatch.fnmatchcase(test, pattern) for pattern in self.known)

    def outdated(self) -> list[str]:
        """Return the patterns whose tests ran and had the values that they expect."""
        failed = self.failures("value")
        ran = {pattern: fnmatch.filter(self.passing, pattern) for pattern in self.known}
        return [pattern for pattern, tests in ran.items() if tests and not any(test in failed for test in tests)]


_UNFINISHED = Ending("failed", "structural", "passes untouched, but was skipped or not finished; see the log")


def table(compared: Comparison) -> str:
    """Return the table: a line for each suite."""
    titles = ["tests", "pass untouched", "patched in", "pass patched", "values differ", "(known)", "structural"]
    lines = [["", *titles]]
    for name, folder in SUITES.items():
        tests = [test for test in compared.untouched if test.startswith(f"{folder}/")]
        passing = [test for test in compared.passing if test in tests]
        values = [test for test in compared.failures("value") if test in tests]
        structural = [test for test in compared.failures("structural") if test in tests]
        patched = [test for test in passing if compared.patched.get(test, _UNFINISHED).patched]
        known = [test for test in values if compared.is_known(test)]
        passed = len(passing) - len(values) - len(structural)
        counts = [len(tests), len(passing), len(patched), passed, len(values), len(known), len(structural)]
        lines.append([name, *map(str, counts)])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def report(compared: Comparison) -> bool:
    """Print the table and what failed; tell whether nothing failed that is not known."""
    print(table(compared))
    structural, values = compared.failures("structural"), compared.failures("value")
    unknown = {test: message for test, message in values.items() if not compared.is_known(test)}
    for title, failed in (("structural", structural), ("values differ", unknown)):
        for message in dict.fromkeys(failed.values()):
            tests = [test for test, said in failed.items() if said == message]
            print("\n    ".join([f"{title}: {message}", *tests]))
    for pattern in compared.outdated():
        print(f"known, but its values are as expected: {pattern}")
    return not structural and not unknown


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, required=True, help="of diffusers, with its tests")
    parser.add_argument("--method", default="elfatt-fast", choices=["exact", *METHODS], help="default: %(default)s")
    parser.add_argument("-k", metavar="EXPRESSION", default="", help="only these tests, as for pytest")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time; more than one needs pytest-xdist")
    parser.add_argument("--offline", action="store_true", help="use no network; CLIP's tokenizers get a stand-in")
    parser.add_argument("--known", type=Path, default=KNOWN, help="tests whose values may differ")
    parser.add_argument("--out", type=Path, default=Path("outputs/diffusers-tests"), help="for logs; %(default)s")
    return parser.parse_args(arguments)


def compare(options: argparse.Namespace) -> Comparison:
    """Run the tests untouched, and those that pass once more, patched.

    Raises:
        ElfattError: no such checkout, no pytest, or no test that passes untouched.
    """
    options.checkout, options.out = options.checkout.resolve(), options.out.resolve()
    known, files = (
        read_known(options.known),
        [file for suite in find_tests(options.checkout).values() for file in suite],
    )
    if importlib.util.find_spec("pytest") is None:
        raise ElfattError("pytest is not installed: pip install '.[test]'")
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"{len(files)} files of tests, untouched ...", flush=True)
    compared = Comparison(run_tests(options, "untouched", files, []), {}, known)
    if not compared.passing:
        raise ElfattError(f"no test passes untouched; {options.out / 'untouched.log'} says why.")
    only = options.out / "passing.txt"
    only.write_text("\n".join(compared.passing), encoding="utf-8")
    print(f"{len(compared.passing)} tests pass untouched; now with {options.method} ...", flush=True)
    again = sorted({test.partition("::")[0] for test in compared.passing})
    compared.patched = run_tests(
        options, "patched", again, [f"--elfatt-method={options.method}", f"--elfatt-only={only}"]
    )
    return compared


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        return 0 if report(compare(parse(arguments))) else 1
    except ElfattError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
