"""What has to hold for the recipe of every toy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tools.toy import export


def check_killed_run(program: str, main: Any, arguments: list[str], out: Path, checkpoint: str) -> None:
    """Kill a recipe without warning once it has a checkpoint, and let it go on in this process."""
    command = [sys.executable, "-m", program, "--out", str(out), *arguments, "--save-every", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 300
        while not (out / "checkpoints" / checkpoint).exists() and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    assert not export.load_record(out / "pipeline")
    main(["--out", str(out), *arguments])


def check_same(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
