"""What the processes of one launch leave in the folders that they share; `test_reference.py` has how they agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elfatt_sd.evaluation import processes
from elfatt_sd.evaluation.protocols import Protocol
from elfatt_sd.evaluation.run import Run


def test_an_interrupted_look_at_a_run_folder_does_not_close_it(
    protocol: Protocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Ctrl-C, and by SIGKILL, which no `finally` follows."""
    run_dir = tmp_path / "run"

    def interrupted(value: Any) -> list[Any]:
        if isinstance(value, tuple):
            raise KeyboardInterrupt
        return [value]

    monkeypatch.setattr(processes, "among_others", lambda: True)
    monkeypatch.setattr(processes, "gathered", interrupted)
    with pytest.raises(KeyboardInterrupt):
        processes.check_shared(run_dir, "run folder", "give --out a folder that all machines share")
    assert not list(run_dir.iterdir())
    processes._new_marker(run_dir, "run folder", "")
    Run(run_dir, protocol).check()
