"""The core and a small evaluation where nothing of Unix is there, in a folder with a space and other letters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import small_run

CODE = """
import builtins, ctypes, os, sys

def ours(depth=4):
    # Other packages know the system that they are on; this one must not.
    frame, names = sys._getframe(2), []
    while frame is not None and len(names) < depth:
        names.append(frame.f_globals.get("__name__") or "")
        frame = frame.f_back
    if names[0].startswith("psutil"):
        return False  # it asks each system in its own way
    return any(name.startswith("elfatt_sd") for name in names)

def without(call, error):
    def wrapper(*arguments, **options):
        if ours(1):
            raise error
        return call(*arguments, **options)
    return wrapper

for name in ("uname", "fork", "pread", "pwrite", "getuid", "symlink", "statvfs"):
    setattr(os, name, without(getattr(os, name), AttributeError(name)))
ctypes.CDLL = type("CDLL", (ctypes.CDLL,), {{"__init__": without(ctypes.CDLL.__init__, OSError("no glibc"))}})
bring = builtins.__import__

def bring_other(name, *rest, **options):
    if name in ("fcntl", "resource", "pwd", "grp", "termios") and ours(1):
        raise ImportError(name)
    return bring(name, *rest, **options)

def hide(event, arguments):
    if event == "open" and str(arguments[0]).startswith("/proc") and ours():
        raise FileNotFoundError(arguments[0])

builtins.__import__ = bring_other
sys.addaudithook(hide)
import elfatt_sd
from elfatt_sd.cli import app

pipe = elfatt_sd.load_pipeline({model!r}, device="cpu")
with elfatt_sd.patched(pipe, "elfatt"):
    pass
app({words!r})
"""


def test_a_small_evaluation_without_unix(workplace: Path, tmp_path: Path) -> None:
    place = tmp_path / "mit Leerzeichen é"
    place.mkdir()
    cells = small_run.UNTOUCHED + '[[cells]]\nmethod = "elfatt"\nratio = 0.5\nblock_size = 16\nagents = 8\n'
    protocol = small_run.write_protocol(place, workplace / "sd15", cells)
    words = ["eval", "run", str(protocol), "--out", str(place / "run"), "--quiet", "--limit", "3"]
    for override in small_run.full_overrides(workplace):
        words += ["--set", override]
    code = CODE.format(model=str(workplace / "sd15"), words=words)
    environment = {**os.environ, "ELFATT_SD_CACHE": str(place / "cache"), "PYTHONUTF8": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(small_run.ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=500)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    rows = json.loads((place / "run" / "results.json").read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 3 and all(row["distances"] and row["time"] for row in rows)
    assert all(row["memory"]["failed"].startswith("not measured: ") for row in rows), "no system tells"
    for path in (place / "run").rglob("*"):
        assert not set(path.name) & set('<>:"|?*\\'), path
