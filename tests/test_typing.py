"""What a type checker tells the users of the package, and that its lazy names cost and hide nothing."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import elfatt_sd

ROOT = Path(__file__).parents[1]
# Each line with `# E: words` must be an error with these words, and no other line may be one.
USES = """
from pathlib import Path
from typing import Any, assert_type

import elfatt_sd
from elfatt_sd import METHODS, Method, PatchConfig, Phase, Settings
from elfatt_sd.plans import Plan


class Pipeline:
    unet: Any


pipe = Pipeline()
assert_type(elfatt_sd.apply_patch(pipe), Pipeline)
assert_type(elfatt_sd.apply_patch(pipe, "elfatt", ratio=0.5, block_size=128, autotune=True), Pipeline)
assert_type(elfatt_sd.apply_patch(pipe, PatchConfig.preset("agent", ratio=0.4), max_downsample=None), Pipeline)
assert_type(elfatt_sd.remove_patch(pipe), Pipeline)
assert_type(elfatt_sd.is_patched(pipe), bool)
assert_type(elfatt_sd.plan(pipe, "elfatt-fast", height=512, seed=1), Plan)
with elfatt_sd.patched(pipe, "tome", ratio=1) as planned:
    assert_type(planned, Plan)
shared: Settings = {"ratio": 0.5, "second_order": "spread"}
elfatt_sd.apply_patch(pipe, **shared)
plain: dict[str, Any] = {"ratio": 0.5}
elfatt_sd.apply_patch(pipe, **plain)
for method in METHODS:
    elfatt_sd.apply_patch(pipe, method)
typed: Method = elfatt_sd.known_method(input())
assert_type(PatchConfig.preset(typed), PatchConfig)
config = PatchConfig("mine", (Phase(0.5, "block", block_order="windows"),), levels=2)
config.save("c.json")
config.save(Path("c.json"))
assert_type(PatchConfig.load("c.json").with_settings(agents=7), PatchConfig)
tuned = elfatt_sd.tune(pipe, closeness=35, prompts=["a cat", "a dog"], metric=lambda first, second: 1.0)
assert_type(tuned.apply(pipe), Pipeline)
assert_type(tuned.config, PatchConfig)
elfatt_sd.tune(pipe, speed=1.5, metric="lpips", weights=Path("vgg.pth"))

elfatt_sd.tune(pipe, closeness=35, metric="fid")  # E: "metric"
elfatt_sd.tune(pipe, closeness=35, metric=3)  # E: "metric"
elfatt_sd.tune(pipe, closenes=35)  # E: "closenes"
tuned.aply(pipe)  # E: "aply"
elfatt_sd.apply_patch(pipe, "elfat")  # E: Literal['elfat']
elfatt_sd.apply_patch(pipe, input())  # E: "str"
elfatt_sd.apply_patch(pipe, "elfatt", ratioo=0.5)  # E: "ratioo"
elfatt_sd.apply_patch(pipe, "elfatt", ratio="half")  # E: "ratio"
elfatt_sd.apply_patch(pipe, "elfatt", 0.5)  # E: positional
elfatt_sd.apply_patch(pipe, autotune="yes")  # E: "autotune"
elfatt_sd.apply_patch(pipe, until=0.5)  # E: "until"
with elfatt_sd.patched(pipe, "tomes"):  # E: Literal['tomes']
    pass
with elfatt_sd.patched(pipe, "tome", stryde=2):  # E: "stryde"
    pass
elfatt_sd.plan(pipe, "sdd")  # E: Literal['sdd']
elfatt_sd.plan(pipe, hight=512)  # E: "hight"
elfatt_sd.plan(pipe, block_order="spiral")  # E: "block_order"
PatchConfig.preset("agents")  # E: Literal['agents']
PatchConfig.preset("agent", agent=7)  # E: "agent"
config.with_settings(attention_backend="flush")  # E: "attention_backend"
config.with_settings(max_downsample=3)  # E: "max_downsample"
config.seed = 1  # E: "seed"
PatchConfig("mine", level=2)  # E: "level"
Phase(0.5, "blocks")  # E: Literal['blocks']
Phase(0.5, "elfatt", split="halves")  # E: "split"
wrong: Settings = {"ratios": 0.5}  # E: "ratios"
PatchConfig.load()  # E: "load"
PatchConfig.lode("c.json")  # E: "lode"
elfatt_sd.nothing()  # E: "nothing"
elfatt_sd.apply_patches(pipe)  # E: "apply_patches"
from elfatt_sd import remove_patches  # E: "remove_patches"
"""
# What is not ours, or heavy, is `Any`: this test is of our own signatures.
CONFIG = """
[mypy]
strict = true
[mypy-elfatt_sd.*]
follow_imports = silent
[mypy-torch.*,diffusers.*,transformers.*,numpy.*,PIL.*,safetensors.*,huggingface_hub.*,rich.*,typer.*]
follow_imports = skip
"""


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy checks it: pip install -e '.[dev]'")
def test_wrong_uses_are_errors_and_right_ones_are_not(tmp_path: Path) -> None:
    (tmp_path / "uses.py").write_text(USES)
    (tmp_path / "mypy.ini").write_text(CONFIG)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache", "uses.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "MYPYPATH": str(ROOT)}, capture_output=True, text=True, timeout=300
    )
    said: dict[int, str] = {}
    for line in done.stdout.splitlines():
        if found := re.match(r"uses\.py:(\d+): error: (.*)", line):
            said[int(found[1])] = said.get(int(found[1]), "") + found[2]
    wanted = {number: line.partition("# E: ")[2] for number, line in enumerate(USES.splitlines(), 1) if "# E: " in line}
    assert said.keys() == wanted.keys(), done.stdout + done.stderr
    for number, words in wanted.items():
        assert words in said[number], done.stdout


def test_every_public_name_is_there_and_no_other() -> None:
    for name in elfatt_sd.__all__:
        assert getattr(elfatt_sd, name) is not None
    assert set(dir(elfatt_sd)) == set(elfatt_sd.__all__)
    assert {*elfatt_sd._HOMES, "__version__"} == set(elfatt_sd.__all__)
    with pytest.raises(AttributeError, match="module 'elfatt_sd' has no attribute 'nothing'"):
        elfatt_sd.nothing  # noqa: B018


def test_importing_the_package_loads_nothing() -> None:
    lines = (
        "import sys, elfatt_sd",
        "assert not [name for name in sys.modules if name.startswith('elfatt_sd.')]",
        "assert not {'torch', 'diffusers', 'transformers', 'numpy'} & sys.modules.keys()",
        "elfatt_sd.PatchConfig.preset('elfatt', ratio=0.4)",
        "assert not {'diffusers', 'transformers'} & sys.modules.keys()",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, cwd=ROOT, timeout=100)
