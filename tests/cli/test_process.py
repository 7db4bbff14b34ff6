"""The command as a process: its launcher, Ctrl-C, and a bar beside a pipe."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.commands import PROMPT, ROOT, files, pixels

pytestmark = pytest.mark.usefixtures("library_chatter")


def without_progress(text: str) -> str:
    """What another process printed without its lines of progress."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("image "))


def test_paths_go_to_a_pipe_beside_a_bar() -> None:
    """`elfatt-sd generate > list` at a terminal: the bar is drawn there, and the list is in the file."""
    script = "from elfatt_sd.cli.output import progress\nwith progress(1):\n    print('a path')"
    ours, terminal = os.openpty()
    try:
        environment = {**os.environ, "TERM": "xterm"}
        done = subprocess.run([sys.executable, "-c", script], stdout=-1, stderr=terminal, env=environment, check=True)
    finally:
        os.close(terminal)
    drawn = os.read(ours, 1 << 16)
    os.close(ours)
    assert done.stdout == b"a path\n"
    assert b"preparing" in drawn and b"a path" not in drawn


def run(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "cli.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=300, stdin=subprocess.DEVNULL)


def test_the_launcher_works_from_any_folder(model: Path, tmp_path: Path) -> None:
    done = run("generate", PROMPT, "--model", model, "--steps", 1, "--compare", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert without_progress(done.stderr) == ""
    assert files(tmp_path / "outputs") == ["0001-a-red-star.json", "0001-a-red-star.png"]
    wrong = run("generate", PROMPT, "--model", model, "--ratio", 2, cwd=tmp_path)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "error: ratio=2.0 is not accepted; give a number from 0 to less than 1.\n"


def heed_control_c() -> None:
    """Undo that whoever started the tests in the background has SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_control_c_is_one_line_and_finished_pictures_stay(model: Path, tmp_path: Path) -> None:
    words = ["generate", PROMPT, "--model", model, "--steps", 1, "--num-images", 100_000, "--out", tmp_path]
    command = [sys.executable, str(ROOT / "cli.py"), *map(str, words)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, preexec_fn=heed_control_c) as process:
        assert process.stdout is not None
        first = process.stdout.readline().strip()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert without_progress(errors) == "error: stopped; what was finished stays\n"
    assert first == str(tmp_path / "0001-a-red-star.png")
    written = [path for path in tmp_path.iterdir() if path.suffix == ".png"]
    assert written
    for path in written:
        json.loads(path.with_suffix(".json").read_text())
        assert len(pixels(path)) == 32 * 32 * 3
    assert not [path for path in tmp_path.iterdir() if path.suffix not in (".png", ".json")]
