"""What images were made with; other code, weights or versions are refused where they have made some."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from support import runs
from support.runs import ROOT, make, row_of, run_data

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation import generate, provenance
from elfatt_sd.evaluation.protocols import Protocol
from elfatt_sd.evaluation.provenance import image_environment


def test_processes_that_would_make_other_images_are_refused(
    made: tuple[Path, Protocol], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as those of a machine with another version of PyTorch; no row need have been begun."""
    run_dir, protocol = made
    environment = run_data(run_dir)["environment"]
    packages = environment["packages"] | {"torch": "1.0"}
    for other, differ in (({**environment, "packages": packages}, True), (environment, False)):
        monkeypatch.setattr(generate, "gathered", lambda own, other=other: [own, other])
        with (
            pytest.raises(ElfattError, match=r"0 and 1 would .* \(torch: .* there, 1.0 here")
            if differ
            else nullcontext()
        ):
            generate._check_processes(environment, protocol.cells)


def test_another_specification_is_refused_with_the_difference(made: tuple[Path, Protocol], tmp_path: Path) -> None:
    run_dir, protocol = made
    other = runs.small_protocol(tmp_path, Path(protocol.model), "steps=5", "guidance=2.0")
    with pytest.raises(ElfattError) as error:
        make(run_dir, other)
    refused = ("another specification", "steps: 4 there, 5 here", "guidance: 7.5 there, 2.0 here", f"--reuse {run_dir}")
    for part in refused:
        assert part in str(error.value)


def test_other_weights_are_refused(made: tuple[Path, Protocol], tmp_path: Path) -> None:
    from support import tiny_pipelines as tiny

    run_dir, protocol = made
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    row_of(copy, protocol.cells[-1]).manifest.unlink()
    pipe = tiny.sd15(tmp_path)
    with torch.no_grad():
        pipe.unet.conv_in.bias += 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "load_protocol_pipeline", lambda *_: pipe)
        with pytest.raises(ElfattError, match=r"images come out differently \(model_sha256"):
            make(copy, protocol)


def code_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the method's code be another from now on."""
    real = image_environment
    monkeypatch.setattr(generate, "image_environment", lambda *args: {**real(*args), "method_sha256": "of other code"})


def test_other_code_is_refused_where_it_has_made_images(
    made: tuple[Path, Protocol], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, protocol = made
    shutil.copytree(run_dir, tmp_path / "run")
    row_of(tmp_path / "run", protocol.cells[-1]).manifest.unlink()
    code_changes(monkeypatch)
    with pytest.raises(
        ElfattError, match=r"images come out differently \(method_sha256: \w+ there, of other code here\)"
    ):
        make(tmp_path / "run", protocol)


def test_other_code_is_no_matter_where_it_has_made_none(
    made: tuple[Path, Protocol], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the untouched rows are there: the run goes on, and says which code made the others."""
    run_dir, protocol = made
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    shutil.rmtree(row_of(copy, protocol.cells[2]).folder)
    before = run_data(copy)
    code_changes(monkeypatch)
    assert make(copy, protocol) == {}
    now = run_data(copy)
    assert now["environment"]["method_sha256"] == "of other code"
    assert {**now, "environment": before["environment"]} == before


def test_the_hashed_modules_are_all_that_a_patch_imports() -> None:
    """A module that a patch comes to use has to be added, or named here as one that changes no image."""
    package, hashed = ROOT / "elfatt_sd", (*provenance._METHOD, "methods", "families", "attention.triton")
    idle = {"devices", "errors", "files", "plans", "runtime", "runtime.autotune"}
    for name in provenance._METHOD:
        for node in ast.walk(ast.parse((package / f"{name.replace('.', '/')}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("elfatt_sd"):
                for part in node.names:
                    place = package.joinpath(*str(node.module).split(".")[1:], part.name)
                    module = place if place.with_suffix(".py").is_file() or place.is_dir() else place.parent
                    found = ".".join(module.relative_to(package).parts)
                    assert found in idle or found.startswith(hashed), f"{name} imports {found}"


@pytest.mark.parametrize(
    ("part", "changed"),
    [("unet", {"attention_head_dim": 4}), ("vae", {"scaling_factor": 0.5}), ("scheduler", {"steps_offset": 7})],
)
def test_settings_of_parts_belong_to_the_model(protocol: Protocol, part: str, changed: dict[str, float]) -> None:
    pipe = generate.load_protocol_pipeline(protocol)
    before = image_environment(protocol, pipe)
    assert image_environment(protocol, generate.load_protocol_pipeline(protocol)) == before
    getattr(pipe, part).register_to_config(**changed)
    now = image_environment(protocol, pipe)
    assert [name for name in now if now[name] != before[name]] == ["model_sha256"]


def test_tokenizers_count_by_what_they_make_of_the_prompts(protocol: Protocol) -> None:
    pipe = generate.load_protocol_pipeline(protocol)
    before = image_environment(protocol, pipe)
    pipe.tokenizer.model_max_length -= 1
    now = image_environment(protocol, pipe)
    assert [name for name in now if now[name] != before[name]] == ["prompts_sha256"]


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
    cells = runs.UNTOUCHED + '[[cells]]\nmethod = "elfatt"\nratio = 0.5\nblock_size = 16\nagents = 8\n'
    protocol = runs.write_protocol(place, workplace / "sd15", cells)
    words = ["eval", "run", str(protocol), "--out", str(place / "run"), "--quiet", "--limit", "3"]
    for override in runs.full_overrides(workplace):
        words += ["--set", override]
    code = CODE.format(model=str(workplace / "sd15"), words=words)
    environment = {**os.environ, "ELFATT_SD_CACHE": str(place / "cache"), "PYTHONUTF8": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(runs.ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=500)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    rows = json.loads((place / "run" / "results.json").read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 3 and all(row["distances"] and row["time"] for row in rows)
    assert all(row["memory"]["failed"].startswith("not measured: ") for row in rows), "no system tells"
    for path in (place / "run").rglob("*"):
        assert not set(path.name) & set('<>:"|?*\\'), path
