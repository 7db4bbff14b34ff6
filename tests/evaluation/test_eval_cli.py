"""The commands of `elfatt-sd eval`: what they print, their exit codes, and one line for every error."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from support import runs
from support.runs import full_overrides, row_of

from elfatt_sd.cli import app
from elfatt_sd.cli.evaluation import build_protocol
from elfatt_sd.evaluation import extraction, generate
from elfatt_sd.evaluation.protocols import load_protocol
from elfatt_sd.evaluation.run import Run


class Done:
    def __init__(self, code: int, captured: Any) -> None:
        self.code, self.out, self.err = code, captured.out, captured.err


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("ELFATT_SD_CACHE", str(workplace / "cache"))

    def run(*words: object) -> Done:
        with pytest.raises(SystemExit) as end:
            app(["eval", *map(str, words)], prog_name="elfatt-sd")
        return Done(int(end.value.code or 0), capsys.readouterr())

    return run


@pytest.fixture
def protocol(tmp_path: Path, workplace: Path) -> Path:
    return runs.write_protocol(tmp_path, workplace / "sd15")


def sets(overrides: list[str]) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


def test_run_prints_the_page_and_the_other_commands_work_on_it(
    call: Any, workplace: Path, protocol: Path, in_process: None, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    done = call("run", protocol, "--out", run_dir, "--limit", 3, "--quiet", *sets(full_overrides(workplace)))
    assert done.code == 0, done.err
    table, _, path = done.out.strip().rpartition("\n\n")
    page = Path(path)
    assert page == run_dir / "report" / "index.html"
    assert page.is_file()
    assert "Difference" in table and "(null row)" in table and "A quick look" in table
    assert all(len(line) <= 80 for line in table.splitlines())
    assert Run.open(run_dir).protocol.limit == 3
    assert len(Run.open(run_dir).baseline.made_images()) == 3
    assert call("score", run_dir, "--quiet").code == 0
    page.unlink()
    assert call("report", run_dir).code == 0
    assert page.is_file()
    done = call("verify", run_dir)
    assert (done.code, done.err) == (0, "")
    Run.open(run_dir).rows[1].image_file(1).unlink()
    done = call("verify", run_dir)
    assert done.code == 1
    assert "null/images/00001.png: deleted" in done.err
    assert len(done.err.splitlines()) == 1


def test_dry_run_prints_and_makes_nothing(call: Any, workplace: Path, protocol: Path, tmp_path: Path) -> None:
    text = protocol.read_text().replace("SD (Baseline)", "[/b] :star: \\u001b[2J")  # labels are printed as they are
    protocol.write_text(text)
    done = call("run", protocol, "--out", tmp_path / "run", "--dry-run", *sets(full_overrides(workplace)))
    assert done.code == 0, done.err
    for word in (
        r"[/b] :star: \x1b[2J",
        "tomesd-ratio0.5",
        "20 images",
        "5 a row",
        "GiB of disk",
        "are free",
        "to do: 20 images of 4 steps",
        "to measure the memory",
    ):
        assert word in done.out
    assert done.err == ""
    done = call("run", "toy", "--out", tmp_path / "run", "--dry-run", *sets(["reference.source=none.npz"]))
    assert (done.code, "reference none.npz does not exist" in " ".join(done.err.split())) == (2, True)
    given = ["--model", "/nowhere/sd", "--inception-weights", "/nowhere/weights", "--reference", "/nowhere/val"]
    done = call("run", "paper_table", "--out", tmp_path / "run", "--dry-run", *given, "--dtype", "int3")
    assert (done.code, "34000 images" in done.out, "to do: 34000 images" in done.out) == (2, True, True)
    for obstacle in ("/nowhere/sd", "/nowhere/weights", "/nowhere/val", "int3"):
        assert sum(obstacle in line for line in done.err.splitlines()) >= 1, obstacle
    assert not (tmp_path / "run").exists()


def test_dry_run_names_folders_that_will_not_do(call: Any, tmp_path: Path) -> None:
    wrong = tmp_path / "file"
    wrong.touch()
    done = call("run", "toy", "--dry-run", *sets(["height=64", "width=64"]), "--out", wrong, "--reuse", wrong)
    said = " ".join(done.err.split())
    assert (done.code, "cannot be written" in said, "holds no run" in said) == (2, True, True)


def test_reference_says_what_it_found(call: Any, workplace: Path, protocol: Path) -> None:
    overrides = sets([line for line in full_overrides(workplace) if "reference" not in line])
    done = call("reference", protocol, "--reference", workplace / "val", "--allow-count", *overrides)
    assert done.code == 0, done.err
    assert '"count": 12' in done.out


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("--set", "stepz=3"), ("'stepz'", "accepted")),
        (("--set", "time.repeats=few"), ("time.repeats='few'", "whole number")),
        (("--limit", "0"), ("--limit", "greater than or equal to 1")),
        (("--limit", "1"), ("1 image a row has no distance", "at least 2")),
        (("--reference", "/nowhere/val"), ("/nowhere/val", "does not exist")),
        (("--model", "/nowhere/sd"), ("/nowhere/sd", "does not exist")),
        (("--device", "abacus"), ("abacus", "accepted")),
        (("--dtype", "int3"), ("int3", "accepted")),
        (("--variant", "fp16"), ("variant='fp16' is not in model", "there is: weights without a variant")),
        (("--set", "height=33"), ("height=33 is not accepted",)),
        (("--force",), ("No such option: --force",)),
        (("--set", "reference.count=13"), ("12 images", "13")),
        (("--set", "steps=5000"), ("steps=5000 is not accepted; give a whole number from 1 to 1000",)),
        (("--set", "steps=6", "--out", "RUN"), ("steps: 4 there, 6 here",)),
        (("--inception-weights", "FILE", "--set", 'extractors=["inception"]'), ("sha256",)),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(
    call: Any, copy: Path, workplace: Path, protocol: Path, tmp_path: Path, words: tuple[str, ...], parts: tuple[str]
) -> None:
    """RUN is a run of another specification, FILE holds no weights."""
    (tmp_path / "weights.pth").write_bytes(b"not the published file")
    given = [{"RUN": copy, "FILE": tmp_path / "weights.pth"}.get(word, word) for word in words]
    overrides = sets(full_overrides(workplace))
    done = call("run", protocol, "--out", tmp_path / "new", "--quiet", *overrides, "--limit", 2, *given)
    assert done.code == 2
    assert len(done.err.splitlines()) == 1, done.err
    for part in parts:
        assert part in done.err


@pytest.mark.filterwarnings("default::UserWarning")
def test_a_batch_that_fits_nowhere_is_warned_of_and_fails_its_row(
    call: Any, workplace: Path, protocol: Path, tmp_path: Path
) -> None:
    side = 2**23
    sizes = [f"height={side}", f"width={side}"]
    done = call("generate", protocol, "--out", tmp_path / "run", "--quiet", *sets([*full_overrides(workplace), *sizes]))
    assert done.code == 1
    warned, failed = done.err.splitlines()
    assert "warning: a batch of " in warned and f"{side}x{side} needs about" in warned
    assert failed.startswith("error: row sd failed: out of memory at batch")


def test_folders_that_hold_no_run_are_named(call: Any, tmp_path: Path) -> None:
    for command in ("score", "report", "verify"):
        done = call(command, tmp_path)
        assert (done.code, "holds no run" in done.err) == (2, True)
    assert build_protocol("toy", model="models/\N{GRINNING FACE}é").model == "models/\N{GRINNING FACE}é"


def test_ctrl_c_is_one_line_and_keeps_finished_work(
    call: Any, protocol: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = generate.make_images, [0]

    def interrupted(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(generate, "make_images", interrupted)
    done = call("generate", protocol, "--out", tmp_path / "run", "--quiet")
    assert done.code == 130
    assert len(done.err.splitlines()) == 1
    cell = load_protocol(protocol).baseline
    assert row_of(tmp_path / "run", cell).image_file(1).is_file()
    assert call("generate", protocol, "--out", tmp_path / "run", "--quiet").code == 0
    assert len(row_of(tmp_path / "run", cell).made_images()) == 5


@pytest.mark.parametrize(
    ("command", "module", "writes"), [("generate", generate, "_write_png"), ("reference", extraction, "atomic_file")]
)
def test_a_full_disk_is_a_failure(
    call: Any,
    workplace: Path,
    protocol: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    module: Any,
    writes: str,
) -> None:
    """That of the run, and that of the cache."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("ELFATT_SD_CACHE", str(tmp_path / "full"))
    monkeypatch.setattr(module, writes, full)
    out = [] if command == "reference" else ["--out", tmp_path / "full", "--quiet"]
    done = call(command, protocol, *out, *sets(full_overrides(workplace)))
    assert done.code == 1
    assert f"no space left on the disk of {tmp_path / 'full'}" in done.err
    assert len(done.err.splitlines()) == 1


def test_a_failed_row_is_named_with_exit_code_1(
    call: Any, protocol: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = generate.check_images
    monkeypatch.setattr(generate, "check_images", lambda images, indices: check(images * 0, indices))
    done = call("generate", protocol, "--out", tmp_path / "run", "--quiet")
    assert done.code == 1
    said = "error: row sd failed: image 0 is black: an overflow (give dtype float32 or bfloat16), or a safety checker\n"
    assert done.err == said, "without the baseline the others are not begun"
