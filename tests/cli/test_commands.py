"""`elfatt-sd bench`, `patch`, `try` and `tune`, and the command as a process of its own: Ctrl-C, a bar and a pipe."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.checks import counting
from support.commands import PROMPT, ROOT, call, draw, files, pixels

from elfatt_sd.config import PatchConfig
from elfatt_sd.drawing.studio import Studio

pytestmark = pytest.mark.usefixtures("library_chatter", "own_cache")
LAYER = ("bench", "layer", "--tokens", 64, "--repeats", 1, "--no-memory", "--dtype", "float32")


def plain(text: str) -> list[str]:
    """Lines of a terminal without their colours."""
    return [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in text.splitlines()]


def test_bench_prints_and_saves_and_counts_its_calls(tmp_path: Path, monkeypatch: Any) -> None:
    """A second time, too: a benchmark begins again. A bar counts rounds times variants, and the warm-up of each."""
    for words, table in (([], "64 tokens, batch 2, layer"), (["--markdown"], "\n| layer | tomesd 0.5 | ")):
        result = call(*LAYER, *words, "--out", tmp_path / "out")
        assert result.exit_code == 0, result.output
        assert table in result.stdout
        assert ("|" in result.stdout) == bool(words) and "nbsp" not in result.stdout
        assert files(tmp_path / "out") == ["layer.json", "layer.md", "layer.png"]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    shown = call(*LAYER, "--repeats", 2)
    counts = [(int(done), int(total)) for done, total in re.findall(r"(\d+)/(\d+) calls", shown.stderr)]
    assert counts[-1][0] == counts[-1][1] and counts[-1][1] % 3 == 0, "a warm-up and two rounds"
    assert max(map(len, plain(shown.stdout))) <= 80


def test_bench_times_attentions_of_vision_transformers_and_their_growth() -> None:
    result = call(*LAYER, *["--tokens", 256, "--attention", "softmax", "--attention", "elfatt", "--markdown"])
    assert re.search(r"\n\| 256 \| training step \| elfatt \| .* \|\n", result.stdout), result.output
    assert re.search(r"to the power of, forward: `softmax` -?[\d.]+, `elfatt` -?[\d.]+\.\n", result.stdout)
    assert "attention='linear' is not known; accepted: softmax, elfatt" in call(*LAYER, "--attention", "linear").stderr


def test_what_is_finished_stays_when_it_is_stopped(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    left = iter([1, 2])

    def interrupt_the_third(*_: Any) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    counting(monkeypatch, Studio, "draw", interrupt_the_third)
    methods = ["--method", "agent", "--method", "tome"]
    result = call("try", model, "a", "red", "star", *methods, "--steps", 2, "--out", tmp_path)
    assert (result.exit_code, result.stderr) == (130, "error: stopped; what was finished stays\n")
    record = json.loads((tmp_path / "0001-a-red-star.json").read_text())
    assert [row["method"] for row in record["methods"]] == ["sd", "agent"]
    assert re.findall(r"^([a-z-]+), round 1 of 2", result.stdout, re.MULTILINE) == ["untouched", "agent"]
    assert re.search(r"^agent, .* times as fast, PSNR ", result.stdout, re.MULTILINE)
    assert "0001-a-red-star.png" in files(tmp_path)


def test_several_prompts_or_models_are_a_sheet(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.symlink_to(model)
    (tmp_path / "prompts.txt").write_text("a dog\n")
    words = ["--model", other, "--prompt-file", tmp_path / "prompts.txt", "--method", "tome", "--steps", 4]
    result = call("try", model, "a", "red", "star", *words, "--repeats", 1, "--out", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    assert files(tmp_path / "out") == ["0001-demo-sheet.html", "0001-demo-sheet.json", "0001-demo-sheet.png"]
    written = json.loads((tmp_path / "out" / "0001-demo-sheet.json").read_text())
    path, page = (str(tmp_path / "out" / f"0001-demo-sheet.{suffix}") for suffix in ("png", "html"))
    assert json.loads(result.stdout) == {"path": path, **written, "page": page}
    assert Path(page).read_text(encoding="utf-8").count('type="range"') == 4
    trials = written["trials"]
    assert [trial["prompt"] for trial in trials] == ["a red star", "a dog"] * 2
    assert [trial["model"] for trial in trials] == [str(model)] * 2 + [str(other)] * 2


def test_patch_saves_and_prints_a_plan_and_lines_that_run(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    saved = tmp_path / "my.json"
    words = ["--method", "tome", "--height", 64, "--width", 48, "--allow-pickle", "--ratio", 0.2]
    data = json.loads(call("patch", model, *words, "--save", saved, "--json").stdout)
    assert (data["height"], data["width"], sum(layer["patched"] for layer in data["layers"])) == (32, 24, 3)
    assert data["python"][2:] == [
        f'pipe = elfatt_sd.load_pipeline("{model}", allow_pickle=True)',
        f"elfatt_sd.apply_patch(pipe, elfatt_sd.PatchConfig.load({json.dumps(str(saved))}))",
    ]
    config = PatchConfig.load(saved)
    assert config == PatchConfig.preset("tome", ratio=0.2)
    draw(model, tmp_path / "out", "--config", saved, "--set", "fp32_logits=true")
    record = json.loads((tmp_path / "out" / "0001-a-red-star.json").read_text())
    assert PatchConfig.from_dict(record["config"]) == config.with_settings(fp32_logits=True)
    result = call("patch", model, "--method", "elfatt", "--ratio", 0.25, "--block-order", "curve")
    assert result.exit_code == 0, result.output
    assert "elfatt: patches 3 of 7 self-attention layers" in result.stdout
    lines = result.stdout.split("In Python:")[1]
    names: dict[str, Any] = {}
    exec("\n".join(line.strip() for line in lines.splitlines()), names)
    assert names["pipe"].unet.elfatt_patch.config == PatchConfig.preset("elfatt", ratio=0.25, block_order="curve")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    shape = call("patch", "sd15", "--width", 1024).stdout  # equal layers are one row, and nothing is loaded
    assert max(map(len, plain(shape))) <= 80 and len(plain(shape)) < 45 and "…" not in shape
    assert '    pipe = elfatt_sd.load_pipeline("path/or/hub-id")' in plain(shape)
    assert shape.startswith("auto: elfatt-fast, 1.28 times as fast by multiply-adds (latent 64x128)\n")
    call("patch", "sd15", "--save", tmp_path / "auto.json")
    assert PatchConfig.load(tmp_path / "auto.json") == PatchConfig.preset("elfatt-fast")


def test_tune_saves_settings_and_writes_a_page(model: Path, lora: Path, tmp_path: Path) -> None:
    prompts, save, out = tmp_path / "prompts.txt", tmp_path / "tuned.json", tmp_path / "page"
    prompts.write_text("a cat\n")
    Image.radial_gradient("L").resize((48, 40)).save(tmp_path / "photo.png")
    words = ["--closeness", 20, "--steps", 9, "--num-images", 8, "--prompt-file", prompts, "--prompt", "a dog"]
    words += ["--save", save, "--lora", f"{lora}:.5", "--image", tmp_path / "photo.png", "--strength", 0.95]
    result = call("tune", model, *words, "--scheduler", "euler", "--no-presets", "--out", out, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["asked"]["closeness"], found["settings"]["width"]) == (20.0, 48)
    assert (found["pipeline"], found["settings"]["inputs"]["strength"]) == ("StableDiffusionImg2ImgPipeline", 0.95)
    assert PatchConfig.load(save).origin["scheduler"] == "EulerDiscreteScheduler"
    few = call("tune", model, "--closeness", 20, "--num-images", 7, "--prompt-file", prompts)
    assert few.stderr == "error: num_images=7 is not accepted; give a whole number from 8 to 1000.\n"
    lines = " --".join(re.sub("</?span>", "", (out / "index.html").read_text()).split(" --")[1:])
    assert f"strength 0.95 --scheduler euler --image {tmp_path / 'photo.png'} --lora {lora}:.5 --compare" in lines


def test_paths_go_to_a_pipe_beside_a_bar() -> None:
    """`elfatt-sd generate > list` at a terminal: the bar is drawn there, and the list is in the file."""
    script = "from elfatt_sd.cli import progress\nwith progress(1):\n    print('a path')"
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


def test_control_c_is_one_line_and_finished_pictures_stay(model: Path, tmp_path: Path) -> None:
    """Of the launcher of a checkout, from any folder."""
    words = ["generate", PROMPT, "--model", model, "--method", "tome", "--steps", 1, "--num-images", 100_000]
    command = [sys.executable, str(ROOT / "cli.py"), *map(str, words)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # tests in the background have it ignored
    with subprocess.Popen(command, **pipes, preexec_fn=heed) as process:
        assert process.stdout is not None
        first = process.stdout.readline().strip()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    said = [line for line in errors.splitlines() if not line.startswith("image ")]
    assert said == ["error: stopped; what was finished stays"]
    assert first == "outputs/0001-a-red-star.png"
    assert {path.suffix for path in (tmp_path / "outputs").iterdir()} == {".png", ".json"}
    for path in (tmp_path / "outputs").glob("*.png"):
        json.loads(path.with_suffix(".json").read_text())
        assert len(pixels(path)) == 32 * 32 * 3
