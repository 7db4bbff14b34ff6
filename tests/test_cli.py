"""The command line: what it writes, what it prints, and that every bad input is one line and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_pipelines as tiny
import torch
from PIL import Image
from typer.testing import CliRunner, Result

import elfatt_sd
from elfatt_sd import benchmark_cli, generation
from elfatt_sd.autotune import Decision, Tuner
from elfatt_sd.benchmark_cli import Forecast
from elfatt_sd.calls import LayerState
from elfatt_sd.cli import app
from elfatt_sd.files import check_writable
from elfatt_sd.generation import Studio, free_name
from elfatt_sd.request import Request
from elfatt_sd.running import check_text_to_image

ROOT = Path(__file__).parents[1]
PROMPT = "a red star"
pytestmark = pytest.mark.usefixtures("library_chatter")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stable Diffusion 1.5 in miniature, as a directory."""
    folder = tmp_path_factory.mktemp("model")
    tiny.sd15(folder / "parts").save_pretrained(folder / "tiny")
    return folder / "tiny"


def without_progress(text: str) -> str:
    """What another process printed without its lines of progress."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("image "))


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def draw(model: Path, out: Path, *words: object) -> Result:
    result = call("generate", PROMPT, "--model", model, "--steps", 2, "--out", out, *words)
    assert result.exit_code == 0, result.output
    return result


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def pixels(path: Path) -> bytes:
    with Image.open(path) as picture:
        return picture.tobytes()


def metadata(path: Path) -> dict[str, Any]:
    with Image.open(path) as picture:
        picture.load()
        return dict(picture.info)


def test_generate_writes_a_picture_with_its_settings(model: Path, tmp_path: Path) -> None:
    result = draw(model, tmp_path / "new" / "out", "--ratio", 0.3, "--method", "tome", "--seed", 7, "--guidance", 3)
    assert files(tmp_path / "new" / "out") == ["0001-a-red-star.json", "0001-a-red-star.png"]
    path = tmp_path / "new" / "out" / "0001-a-red-star.png"
    assert str(path) in result.stdout
    assert "peak memory" in result.stdout.splitlines()[-1] and "VmHWM" not in result.stdout
    record = json.loads(path.with_suffix(".json").read_text())
    assert record["prompt"] == PROMPT
    assert (record["seed"], record["steps"], record["guidance"], record["method"]) == (7, 2, 3.0, "tome")
    assert elfatt_sd.PatchConfig.from_dict(record["config"]) == elfatt_sd.PatchConfig.preset("tome", ratio=0.3)
    inside = metadata(path)
    assert inside["prompt"] == PROMPT
    assert json.loads(inside["config"]) == record["config"]
    assert json.loads(inside["versions"])["torch"] == torch.__version__
    assert record["seconds"] > 0
    assert record["peak_memory_bytes"] is None or record["peak_memory_bytes"] > 1e6


def test_generate_draws_what_python_draws(model: Path, tmp_path: Path) -> None:
    draw(model, tmp_path, "--seed", 3, "--device", "cpu", "--agents", 9, "--no-rand", "--patch-seed", 5)
    pipe = elfatt_sd.load_pipeline(model, device="cpu")
    pipe.set_progress_bar_config(disable=True)
    elfatt_sd.apply_patch(pipe, "elfatt", agents=9, use_rand=False, seed=5)
    expected = pipe(PROMPT, num_inference_steps=2, generator=torch.Generator().manual_seed(3)).images[0]
    assert pixels(tmp_path / "0001-a-red-star.png") == expected.tobytes()
    untouched = elfatt_sd.remove_patch(pipe)
    unpatched = untouched(PROMPT, num_inference_steps=2, generator=torch.Generator().manual_seed(3)).images[0]
    assert expected.tobytes() != unpatched.tobytes()


def test_pictures_count_seeds_up_and_do_not_depend_on_each_other(model: Path, tmp_path: Path) -> None:
    draw(model, tmp_path / "both", "--num-images", 2, "--seed", 4)
    draw(model, tmp_path / "second", "--seed", 5)
    both = sorted((tmp_path / "both").glob("*.png"))
    assert [json.loads(path.with_suffix(".json").read_text())["seed"] for path in both] == [4, 5]
    assert pixels(both[1]) == pixels(tmp_path / "second" / "0001-a-red-star.png") != pixels(both[0])


def test_existing_files_are_kept(model: Path, tmp_path: Path) -> None:
    (tmp_path / "0007-mine.png").write_bytes(b"mine")
    draw(model, tmp_path)
    draw(model, tmp_path)
    assert [name for name in files(tmp_path) if name.endswith("png")] == [
        "0007-mine.png",
        "0008-a-red-star.png",
        "0009-a-red-star.png",
    ]
    assert (tmp_path / "0007-mine.png").read_bytes() == b"mine"


def test_compare_shows_both_and_says_how_they_differ(model: Path, tmp_path: Path) -> None:
    result = draw(model, tmp_path, "--compare", "--height", 64, "--width", 48)
    assert "times as fast (one run each, in turn, after a warm-up); PSNR" in result.stdout
    path = tmp_path / "0001-a-red-star.png"
    record = json.loads(path.with_suffix(".json").read_text())
    assert record["speed_ratio"] == pytest.approx(record["untouched_seconds"] / record["seconds"])
    assert 5 < record["psnr_db"] < 100
    with Image.open(path) as sheet:
        assert sheet.width > 2 * 48
        assert sheet.height > 64
    draw(model, tmp_path / "sd", "--method", "sd", "--height", 64, "--width", 48)
    with Image.open(path) as sheet, Image.open(tmp_path / "sd" / "0001-a-red-star.png") as untouched:
        columns = [sheet.crop((16, top, 16 + 48, top + 64)).tobytes() for top in range(sheet.height - 64)]
        assert untouched.tobytes() in columns


def test_compare_leaves_the_pipeline_as_it_was_and_labels_both(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    labels: list[tuple[str, str]] = []
    side_by_side = generation.side_by_side

    def keep(pictures: Any, captions: Any, title: str) -> Any:
        labels.extend(captions)
        return side_by_side(pictures, captions, title)

    monkeypatch.setattr(generation, "side_by_side", keep)
    pipe = elfatt_sd.load_pipeline(model, device="cpu")
    before = dict(pipe.unet.attn_processors)
    request = Request((PROMPT,), elfatt_sd.PatchConfig.preset("tome"), steps=1, compare=True)
    [result] = Studio(pipe, request, tmp_path).results()
    assert pipe.unet.attn_processors == before
    assert result.speed_ratio == pytest.approx(result.untouched_seconds / result.seconds)
    assert [name for name, _ in labels] == [
        f"untouched, {result.untouched_seconds:.2f} s",
        f"tome, {result.seconds:.2f} s",
    ]
    assert labels[1][1] == f"{result.speed_ratio:.2f} times as fast, PSNR {result.psnr_db:.1f} dB"


def test_progress_reports_every_step(model: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    pipe = elfatt_sd.load_pipeline(model, device="cpu")
    request = Request((PROMPT,), elfatt_sd.PatchConfig.preset("sd"), steps=3)
    list(Studio(pipe, request, tmp_path, lambda step, steps: seen.append((step, steps))).results())
    assert seen == [(1, 3), (2, 3), (2, 3), (3, 3)]  # PLMS calls the UNet once more than there are steps


def test_a_terminal_shows_progress(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    assert "steps" not in draw(model, tmp_path).stderr
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = draw(model, tmp_path, "--num-images", 2).stderr
    assert "image 2 of 2" in shown
    assert "4/4 steps" in shown


def test_prompts_come_from_words_and_from_a_file(model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("\n  a blue moon \n\na grüne ring\n", encoding="utf-8")
    draw(model, tmp_path / "out", "--prompt-file", tmp_path / "prompts.txt")
    pictures = sorted((tmp_path / "out").glob("*.png"))
    assert [metadata(path)["prompt"] for path in pictures] == [PROMPT, "a blue moon", "a grüne ring"]


def test_a_saved_configuration_can_be_used(model: Path, tmp_path: Path) -> None:
    saved = tmp_path / "my.json"
    result = call("patch", model, "--method", "agent", "--ratio", 0.2, "--save", saved)
    assert result.exit_code == 0, result.output
    assert f"elfatt_sd.apply_patch(pipe, elfatt_sd.PatchConfig.load({str(saved)!r}))" in result.stdout
    config = elfatt_sd.PatchConfig.load(saved)
    assert config == elfatt_sd.PatchConfig.preset("agent", ratio=0.2)
    draw(model, tmp_path / "out", "--config", saved, "--set", "fp32_logits=true")
    record = json.loads((tmp_path / "out" / "0001-a-red-star.json").read_text())
    assert elfatt_sd.PatchConfig.from_dict(record["config"]) == config.with_settings(fp32_logits=True)


def test_patch_prints_the_plan_and_lines_that_run(model: Path) -> None:
    result = call("patch", model, "--ratio", 0.25, "--block-order", "curve")
    assert result.exit_code == 0, result.output
    assert "elfatt: patches 3 of 7 self-attention layers" in result.stdout
    assert "256 tokens (16x16)" in result.stdout
    assert "times as fast" in result.stdout
    lines = result.stdout.split("In Python:")[1]
    names: dict[str, Any] = {}
    exec("\n".join(line.strip() for line in lines.splitlines()), names)
    from elfatt_sd.patch import current_config

    assert current_config(names["pipe"]) == elfatt_sd.PatchConfig.preset("elfatt", ratio=0.25, block_order="curve")


def test_patch_of_the_default_model() -> None:
    result = call("patch")
    assert result.exit_code == 0, result.output
    assert "4096 tokens (64x64)" in result.stdout
    assert 'pipe = elfatt_sd.load_pipeline("toy")\n' in result.stdout


def test_patch_as_json(model: Path) -> None:
    result = call("patch", model, "--method", "tome", "--height", 64, "--width", 48, "--json")
    data = json.loads(result.stdout)
    assert (data["height"], data["width"]) == (32, 24)
    assert sum(layer["patched"] for layer in data["layers"]) == 3
    assert max(layer["tokens"] for layer in data["layers"]) == 32 * 24
    assert data["multiply_adds_after"] < data["multiply_adds_before"]
    assert data["python"][-1] == 'elfatt_sd.apply_patch(pipe, "tome")'
    pickles = json.loads(call("patch", model, "--allow-pickle", "--json").stdout)["python"]
    assert f'pipe = elfatt_sd.load_pipeline("{model}", allow_pickle=True)' in pickles


@pytest.mark.parametrize("shape", ["sd15", "sdxl"])
def test_patch_of_a_shape_allocates_nothing(shape: str) -> None:
    """Its own size is that of bench; equal layers are one row, and the whole call is counted."""
    result = call("patch", shape, "--json")
    data = json.loads(result.stdout)
    patched, layers, tokens = {"sd15": (5, 16, 4096), "sdxl": (10, 70, 4096)}[shape]
    assert [sum(layer["patched"] for layer in data["layers"]), len(data["layers"])] == [patched, layers]
    assert max(layer["tokens"] for layer in data["layers"]) == tokens
    assert data["call"]["before"] == {"sd15": 401_636_720_640, "sdxl": 3_380_618_199_040}[shape]
    assert 1 < data["call"]["speed"] < data["call"]["limit"]
    assert data["python"][2] == 'pipe = elfatt_sd.load_pipeline("path/or/hub-id")'


def test_patch_of_a_shape_fits_a_terminal(monkeypatch: Any) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    result = call("patch", "sd15")
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in result.stdout.splitlines()]
    assert max(map(len, lines)) <= 80
    assert len(lines) < 45
    assert "…" not in result.stdout


def test_a_shape_has_nothing_to_measure() -> None:
    check_error(call("patch", "sd15", "--autotune"), "model='sd15' is a shape without weights")


def test_options_that_a_shape_does_not_take_are_told() -> None:
    result = call("patch", "sd15", "--variant", "fp16", "--dtype", "float16", "--force", "--json")
    assert {line.split()[1] for line in result.stderr.splitlines()} == {"force", "dtype", "variant"}
    assert all("has no effect" in line for line in result.stderr.splitlines())
    json.loads(result.stdout)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["bench", "denoiser", "--model", "sd15", "--no-memory", "--memory-batch", "2"], "not accepted with --no-mem"),
        (["bench", "layer", "--again", "--tokens", "3"], "again has no effect without --out DIR"),
    ],
)
def test_options_of_benchmarks_without_effect(words: list[str], says: str) -> None:
    result = call(*words)
    assert result.exit_code == 2 and says in result.stderr


def test_settings_of_benchmarks_without_effect(monkeypatch: Any) -> None:
    stopped = SystemExit(7)

    def stop(*_: Any) -> None:
        raise stopped

    monkeypatch.setattr(benchmark_cli, "quiet_libraries", stop)
    words = ["bench", "pipeline", "--model", "toy", "--method", "elfatt-fast:stride=3", "--ratio", "0.4"]
    assert call(*words).stderr.splitlines() == [
        "warning: stride=3 has no effect on method 'elfatt-fast'",
        "warning: ratio=0.4 has no effect on methods that do not merge",
    ]


def test_a_comparison_measures_the_size_that_it_draws(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    measured: set[tuple[int, ...]] = set()

    def decide(tuner: Tuner, state: LayerState, phase: elfatt_sd.Phase, sample: torch.Tensor) -> Decision:
        measured.add(state.grid)
        return Decision(0.5, 0.4, 0.6)

    monkeypatch.setattr(Tuner, "decide", decide)
    draw(model, tmp_path, "--autotune", "--compare", "--height", 64, "--width", 48)
    assert measured == {(1, 32, 24)}


def test_autotune_is_passed_on(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("ELFATT_SD_CACHE", str(tmp_path / "cache"))
    draw(model, tmp_path / "out", "--autotune", "--compare")
    assert json.loads((tmp_path / "out" / "0001-a-red-star.json").read_text())["autotune"] is True
    assert (tmp_path / "cache" / "autotune.json").exists()
    result = call("patch", model, "--autotune", "--json")
    data = json.loads(result.stdout)
    assert data["python"][-1] == 'elfatt_sd.apply_patch(pipe, "elfatt", autotune=True)'
    saved = tmp_path / "saved.json"
    data = json.loads(call("patch", model, "--autotune", "--json", "--save", saved).stdout)
    assert data["python"][-1].endswith(f"PatchConfig.load({str(saved)!r}), autotune=True)")
    assert any("measured here" in layer["reason"] for layer in data["layers"])


def test_paths_go_to_a_pipe_beside_a_bar() -> None:
    """`elfatt-sd generate > list` at a terminal: the bar is drawn there, and the list is in the file."""
    script = "from elfatt_sd.cli_output import progress\nwith progress(1):\n    print('a path')"
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


GENERATE_ERRORS = {
    "ratio": (["--ratio", "1.2"], "ratio=1.2"),
    "ratio not a number": (["--ratio", "much"], "--ratio"),
    "stride": (["--stride", "1"], "stride=1"),
    "block size": (["--block-size", "0"], "block_size=0"),
    "block order": (["--block-order", "zigzag"], "block_order='zigzag'"),
    "agents": (["--agents", "-3"], "agents=-3"),
    "fraction": (["--active-fraction", "1.5"], "active_fraction=1.5"),
    "level": (["--max-downsample", "3"], "max_downsample=3"),
    "backend": (["--attention-backend", "magic"], "attention_backend='magic'"),
    "method": (["--method", "faster"], "method='faster' is not known; accepted: sd, tome, agent, elfatt"),
    "setting": (["--set", "speed=9"], "setting 'speed' is not known"),
    "no setting": (["--set", "method=agent"], "setting 'method' is not known"),
    "nor this": (["--set", "self=1"], "setting 'self' is not known"),
    "setting without value": (["--set", "speed"], "set='speed'"),
    "both": (["--config", "x.json", "--method", "sd"], "exclude each other"),
    "no config": (["--config", "nowhere.json"], "config='nowhere.json' cannot be read"),
    "height": (["--height", "60"], "height=60 is not accepted; give a positive multiple of 8"),
    "width": (["--width", "-8"], "width=-8"),
    "steps": (["--steps", "0"], "steps=0"),
    "too many steps": (["--steps", "1001"], "steps=1001 is not accepted; give a whole number from 1 to 1000"),
    "images": (["--num-images", "0"], "num_images=0"),
    "seed": (["--seed", "-1"], "seed=-1"),
    "guidance": (["--guidance", "nan"], "guidance=nan"),
    "device": (["--device", "cuda:77"], "device='cuda:77'"),
    "too small for its levels": (
        ["--model", "toy", "--height", "8"],
        "height=8 is not accepted; this model needs at least 32, and is",
    ),
    "too large for the machine": (["--width", "8000000"], "x8000000 needs about "),
    "no weights": (["--model", "sdxl"], "model='sdxl' is a shape without weights, for elfatt-sd bench and patch"),
    "unknown device": (["--device", "abacus"], "device='abacus' is not known; accepted: auto"),
    "dtype": (["--dtype", "int8"], "dtype='int8' is not known; accepted: auto, float32"),
    "model": (["--model", "nowhere/to/be/found"], "model='nowhere/to/be/found' does not exist"),
    "nothing to compare": (["--compare", "--method", "sd"], "method='sd' changes nothing"),
    "prompt file": (["--prompt-file", "nowhere.txt"], "prompt_file='nowhere.txt' cannot be read"),
    "empty prompt": ([" "], "empty prompt"),
    "option": (["--fast"], "--fast"),
    "scheduler": (["--scheduler", "fast"], "scheduler='fast' is not known; accepted: ddim, ddpm"),
    "ratio of a method that does not merge": (
        ["--method", "elfatt-fast", "--ratio", ".5"],
        "method 'elfatt-fast'",
    ),
}


# What only PyTorch, or the loaded model, can tell.
LATE = (["--steps", "1001"], ["--device", "cuda:77"])


@pytest.mark.parametrize(("words", "says"), GENERATE_ERRORS.values(), ids=list(GENERATE_ERRORS))
def test_bad_input_is_one_line_and_leaves_nothing(words: list[str], says: str, model: Path, tmp_path: Path) -> None:
    own = [] if "--model" in words else ["--model", model]
    result = call("generate", PROMPT, *own, "--out", tmp_path / "out", *words)
    check_error(result, says)
    assert files(tmp_path) == []


def check_error(result: Result, says: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1, result.stderr
    assert says in result.stderr


def test_no_prompt_and_an_empty_file(model: Path, tmp_path: Path) -> None:
    check_error(call("generate", "--model", model, "--out", tmp_path / "out"), "there is no prompt")
    (tmp_path / "empty.txt").write_text(" \n\n")
    result = call("generate", "--prompt-file", tmp_path / "empty.txt", "--model", model, "--out", tmp_path / "out")
    check_error(result, "is empty; give a text file with one prompt a line")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    result = call("generate", "--prompt-file", tmp_path / "latin.txt", "--model", model, "--out", tmp_path / "out")
    check_error(result, "not UTF-8 text")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("out", ["file/out", "file", "/proc/out"])
def test_an_output_folder_that_cannot_be_written_is_found_before_the_model_is_loaded(out: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    result = call("generate", PROMPT, "--model", "nowhere", "--out", tmp_path / out)
    check_error(result, f"out='{tmp_path / out}' cannot be written")
    assert files(tmp_path) == ["file"]


def test_checking_a_folder_leaves_nothing(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b")
    check_writable(tmp_path)
    assert files(tmp_path) == []


def test_models_that_cannot_be_loaded(model: Path, tmp_path: Path) -> None:
    (tmp_path / "weights.ckpt").write_bytes(b"x")
    check_error(call("patch", tmp_path / "weights.ckpt"), "is a pickle")
    damaged = tmp_path / "damaged"
    shutil.copytree(model, damaged)
    shutil.rmtree(damaged / "vae")
    check_error(call("patch", damaged), "lacks a part: vae")
    (tmp_path / "bad.safetensors").write_bytes(b"not weights")
    check_error(call("patch", tmp_path / "bad.safetensors"), "bad.safetensors")
    check_error(call("patch", model, "--height", 12), "height=12")
    check_error(call("patch", model, "--save", tmp_path / "damaged"), "exists")
    inside = tmp_path / "weights.ckpt" / "my.json"
    check_error(call("patch", model, "--save", inside), f"save='{inside}' cannot be written")
    assert files(tmp_path) == ["bad.safetensors", "damaged", "weights.ckpt"]


def test_a_configuration_file_that_is_none(model: Path, tmp_path: Path) -> None:
    for text, says in (("{", "not JSON"), ("[]", "is not a configuration"), ('{"colour": 1}', "'colour' is not known")):
        (tmp_path / "c.json").write_text(text)
        check_error(call("patch", model, "--config", tmp_path / "c.json"), says)


def test_pipelines_that_need_more_than_a_prompt_are_refused(folder: Path) -> None:
    from diffusers import StableDiffusionImg2ImgPipeline

    pipe = StableDiffusionImg2ImgPipeline(**tiny.sd15_parts(folder), requires_safety_checker=False)
    with pytest.raises(elfatt_sd.ElfattError, match="Img2ImgPipeline needs more than a prompt"):
        check_text_to_image(pipe)


def test_pipelines_without_a_unet_are_refused(tmp_path: Path) -> None:
    from diffusers import DiTPipeline, DiTTransformer2DModel

    size = {"num_attention_heads": 2, "attention_head_dim": 4, "num_layers": 1, "sample_size": 8}
    transformer = DiTTransformer2DModel(in_channels=4, norm_num_groups=4, **size)
    DiTPipeline(transformer, tiny.vae(), tiny.ddim()).save_pretrained(tmp_path / "dit")
    for command in (["patch", tmp_path / "dit"], ["generate", PROMPT, "--model", tmp_path / "dit"]):
        check_error(call(*command), "DiTTransformer2DModel cannot be patched: how its layers attend is not known")


def test_failures_have_exit_code_one_and_show_where_on_request(model: Path, monkeypatch: Any) -> None:
    def explode(*_: object, **__: object) -> None:
        raise RuntimeError("out of luck\nsecond line")

    monkeypatch.setattr("elfatt_sd.pipelines.load_pipeline", explode)
    result = call("patch", model)
    assert result.exit_code == 1
    assert result.stderr == "error: RuntimeError: out of luck (--debug shows where)\n"
    for words in (["--debug", "patch", model], ["patch", model, "--debug"]):
        result = call(*words)
        assert result.exit_code == 1
        assert "Traceback" in result.stderr
        assert "in explode" in result.stderr


def test_interrupting_keeps_what_is_finished(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    drawn = Studio.draw

    def second_is_interrupted(self: Studio, prompt: str, seed: int, steps: int | None = None) -> Any:
        if seed == 1:
            raise KeyboardInterrupt
        return drawn(self, prompt, seed, steps)

    monkeypatch.setattr(Studio, "draw", second_is_interrupted)
    result = call("generate", PROMPT, "--model", model, "--steps", 1, "--out", tmp_path, "--num-images", 3)
    assert result.exit_code == 130
    assert result.stderr == "error: stopped; what was finished stays\n"
    assert files(tmp_path) == ["0001-a-red-star.json", "0001-a-red-star.png"]


def test_a_picture_that_cannot_be_written_leaves_nothing(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    result = call("generate", PROMPT, "--model", model, "--steps", 1, "--out", tmp_path)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {tmp_path / '0001-a-red-star.png'}: No space left on device")
    assert files(tmp_path) == []


def test_flat_pictures_are_pointed_out(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("elfatt_sd.pictures.is_flat", lambda picture: True)
    result = draw(model, tmp_path)
    assert "is one flat colour" in result.stderr


def test_the_toy_names_the_words_it_knows(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from elfatt_sd import pipelines

    loaded = pipelines.load_pipeline(model, device="cpu")
    monkeypatch.setattr(pipelines, "load_pipeline", lambda *_, **__: loaded)
    result = call("generate", "a purple cat", "--steps", 1, "--out", tmp_path)
    assert result.exit_code == 0
    assert result.stderr.startswith("note: the toy does not know 'cat'; it draws one of circle, square")
    assert "--model" in result.stderr
    assert call("generate", "a purple star", "--steps", 1, "--out", tmp_path).stderr == ""


def test_steps_and_guidance_that_are_not_given(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from elfatt_sd import pipelines

    loaded = pipelines.load_pipeline(model, device="cpu")
    monkeypatch.setattr(pipelines, "load_pipeline", lambda *_, **__: loaded)
    for name, expected in (("toy", (25, 3)), ("toy-dit", (12, 1)), ("owner/another", (50, 7.5))):
        assert call("generate", "a red star", "--model", name, "--out", tmp_path / name).exit_code == 0
        record = json.loads((tmp_path / name / "0001-a-red-star.json").read_text())
        assert (record["steps"], record["guidance"]) == expected
    shown = " ".join(call("generate", "--help").stdout.replace("│", "").split())
    assert "Guidance scale; 3 for toy, 1 for toy-dit, and what any other pipeline takes by itself" in shown


def test_names_are_safe_and_short(tmp_path: Path) -> None:
    assert free_name(tmp_path, "../../etc: Ünï/\\*?").name == "0001-etc-ünï.png"
    assert free_name(tmp_path, "???").name == "0001-picture.png"
    assert len(free_name(tmp_path, "word " * 100).name) < 80


def test_bench_prints_and_saves(tmp_path: Path) -> None:
    result = call("bench", "merging", "--tokens", 64, "--repeats", 1, "--dtype", "float32", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "64 tokens, batch 2, float32" in result.stdout
    assert "|" not in result.stdout and "nbsp" not in result.stdout
    assert "64 tokens, batch 2, float32: ours is " in result.stdout or "no method is faster than" in result.stdout
    assert "One round tells little: repeat with more rounds." in result.stdout
    assert result.stderr.startswith("6 calls in all\n64 tokens, batch 2, float32: 0 of 6 calls done\n")
    assert files(tmp_path / "out") == ["merging.json", "merging.md", "merging.png"]


def test_bench_prints_markdown_on_request() -> None:
    result = call("bench", "merging", "--tokens", 64, "--repeats", 1, "--dtype", "float32", "--markdown")
    assert "64 tokens, batch 2, float32:" in result.stdout
    assert "\n| tomesd | " in result.stdout


def test_bench_shows_a_bar_that_counts_calls(monkeypatch: Any) -> None:
    """Rounds times variants of all sizes, and the warm-up of each."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    words = ["--tokens", 64, "--tokens", 256, "--repeats", 2, "--dtype", "float32"]
    shown = call("bench", "merging", *words)
    counts = re.findall(r"(\d+)/(\d+) calls", shown.stderr)
    assert counts[-1] == ("18", "18")
    assert {total for _, total in counts} == {"15", "18"}  # the second size's warm-up is known when it begins
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in shown.stdout.splitlines()]
    assert max(map(len, lines)) <= 80


def test_bench_says_beforehand_how_much_it_does(capfd: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """How many calls, and how long they take once calls were timed; anew where that has doubled."""
    moments = iter([1.0, 100.0, 103.0, 104.0, 124.0, 125.0])
    monkeypatch.setattr("elfatt_sd.benchmark_cli.time.monotonic", lambda: next(moments))
    told: list[int] = []
    forecast = Forecast(lambda name, done, total: told.append(done))
    for done in range(6):
        forecast("256 pixels", done, 20)
    assert told == list(range(6))
    assert capfd.readouterr().err.splitlines() == [
        "20 calls in all",
        "about 60 s in all, if each takes as long as the latest",
        "about 7 min in all, if each takes as long as the latest",
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["layer", "--tokens", "65"], "tokens=65"),
        (["layer", "--tokens", "-4"], "tokens=-4"),
        (["layer", "--tokens", "64", "--block-size", "0"], "block_size=0"),
        (["merging", "--tokens", "64", "--ratio", "-1"], "ratio=-1.0"),
        (["unet", "--memory-batch", "0"], "memory_batch=0"),
        (["unet", "--size", "0", "--method", "tome"], "size=0"),
        (["unet", "--method", "tomesd:agents=8"], "setting 'agents' of tomesd"),
        (["layer", "--repeats", "0"], "repeats=0"),
        (["unet", "--batch", "0"], "batch=0"),
        (["pipeline", "--steps", "0"], "steps=0"),
        (["unet", "--method", "faster"], "method='faster'"),
        (["unet", "--model", "nowhere"], "nowhere"),
        (["merging", "--out", "/proc/out"], "out='/proc/out' cannot be written"),
    ],
)
def test_bench_rejects(words: list[str], says: str) -> None:
    check_error(call("bench", *words), says)


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


EARLY = [
    ["--help"],
    ["--version"],
    ["generate", "--help"],
    ["try", "--help"],
    ["bench", "--help"],
    ["eval", "--help"],
    ["paint"],
    ["generate"],
    ["generate", "--fast"],
    *(["generate", PROMPT, *words] for words, _ in GENERATE_ERRORS.values() if words[:2] not in LATE),
    ["generate", PROMPT, "--out", __file__],
    ["generate", PROMPT, "--model", __file__],
    ["generate", PROMPT, "--scheduler", "fast"],
    ["generate", PROMPT, "--negative-prompt"],
    ["try", "toy", PROMPT, "--rounds", "0"],
    ["try", "toy", PROMPT, "--seed", "-1"],
    ["try", "nowhere/to/be/found"],
    ["patch", "toy", "--height", "12"],
    ["patch", "nowhere/to/be/found"],
    ["generate", "a", "red", "star"],
    ["generate", PROMPT, "--height", "8"],
    ["generate", PROMPT, "--height", "80000", "--width", "80000"],
    ["try", "sdxl"],
    ["bench", "unet", "--model", "toyy"],
    ["bench", "unet", "--model", "toy", "--variant", "fp16"],
    ["bench", "unet", "--variant", "fp16"],
    ["bench", "unet", "--method", "faster"],
    ["bench", "unet", "--size", "-8"],
    ["bench", "unet", "--model", "toy", "--size", "80000"],
    ["bench", "unet", "--repeats", "0"],
    ["bench", "unet", "--dtype", "int8"],
    ["bench", "pipeline", "--device", "abacus"],
    ["bench", "pipeline", "--out", __file__],
    ["bench", "orders", "--model", "sd15"],
    ["eval", "run", "toy", "--out", "runs/none", "--model", "nowhere/to/be/found"],
    ["eval", "run", "toy", "--out", "runs/none", "--device", "abacus"],
    ["eval", "generate", "toy", "--out", __file__],
    ["eval", "run", "toy", "--out", "runs/none", "--reference", "nowhere/to/be/found"],
    ["eval", "run", "toy", "--out", "runs/none", "--reuse", "nowhere/to/be/found"],
    ["eval", "run", "toy", "--out", "runs/none", "--variant", "fp16"],
    ["eval", "run", "toy", "--out", "runs/none", "--device", "cpu", "--set", "width=131072", "--set", "height=131072"],
    ["eval", "run", "toy", "--out", "runs/none", "--inception-weights", "nowhere/to/be/found"],
    ["bench", "unet", "--seconds", "-3"],
    ["bench", "growth", "--max-seconds", "nan"],
    ["eval", "reference", "toy", "--reference", "nowhere/to/be/found"],
    *(["eval", command, "nowhere/to/be/found"] for command in ("score", "report", "verify")),
    ["bench", "unet", "--nope"],
    ["bench", "unet", "--method", "tome:ratio=7"],
    ["bench", "unet", "--ratio", "7"],
    ["bench", "unet", "--compile", "--autotune"],
    ["bench", "unet", "--memory-batch", "0"],
    ["bench", "unet", "--device", "cpu", "--model", "sdxl", "--size", "131072"],
    ["bench", "pipeline", "--device", "cpu", "--model", "sd15", "--batch", "100000"],
    ["bench", "merging", "--dtype", "int3"],
    ["bench", "layer", "--tokens", "5"],
    ["bench", "layer", "--block-size", "0"],
    ["bench", "growth", "--device", "abacus"],
    ["bench", "orders", "--record-at", "99"],
    ["patch", "toy", "--device", "cpu", "--autotune", "--height", "131072", "--width", "131072"],
]


def test_help_and_wrong_use_are_told_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    script = (
        "import json, sys\nfrom elfatt_sd.cli import app\n"
        "for words in json.load(open(sys.argv[1])):\n"
        "    try: app(words, prog_name='elfatt-sd')\n"
        "    except SystemExit as end: assert end.code == (0 if words[-1] in ('--help', '--version') else 2), words\n"
        "    heavy = {'torch', 'diffusers', 'transformers', 'matplotlib'} & set(sys.modules)\n"
        "    assert not heavy, (words, heavy)\n"
    )
    (tmp_path / "words.json").write_text(json.dumps(EARLY))
    command = [sys.executable, "-c", script, str(tmp_path / "words.json")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_version_is_the_package_s() -> None:
    assert call("--version").stdout == f"elfatt-sd {elfatt_sd.__version__}\n"


def test_unknown_commands_are_one_line() -> None:
    check_error(call("paint"), "No such command 'paint'")


def test_words_without_quotes_are_refused_unless_each_is_meant(model: Path, tmp_path: Path) -> None:
    words = ["generate", "a", "red", "star", "--model", model, "--steps", 1, "--out", tmp_path]
    check_error(call(*words), 'give elfatt-sd generate "a red star", or --each')
    assert files(tmp_path) == []
    assert call(*words, "--each").exit_code == 0
    assert len(list(tmp_path.glob("*.png"))) == 3
    assert draw(model, tmp_path / "one").stderr == ""


@pytest.mark.filterwarnings("default::UserWarning")
def test_a_size_far_below_the_model_s_own_is_warned_of(model: Path, tmp_path: Path) -> None:
    result = draw(model, tmp_path, "--height", 8, "--width", 8)
    assert "warning: the model is made for images of 32x32; expect poor ones at 8x8." in result.stderr


@pytest.mark.filterwarnings("default::UserWarning")
def test_settings_without_effect_are_warned_of(model: Path, tmp_path: Path) -> None:
    result = draw(model, tmp_path, "--method", "tome", "--agents", 7)
    assert result.stderr == "warning: agents=7 has no effect on method 'tome'\n"


def test_a_negative_prompt_and_a_scheduler(model: Path, tmp_path: Path) -> None:
    draw(model, tmp_path, "--device", "cpu", "--method", "sd", "--negative-prompt", "blue", "--scheduler", "ddim")
    path = tmp_path / "0001-a-red-star.png"
    record = json.loads(path.with_suffix(".json").read_text())
    assert (record["negative_prompt"], record["scheduler"]) == ("blue", "DDIMScheduler")
    pipe = elfatt_sd.load_pipeline(model, device="cpu")
    pipe.scheduler = generation.make_scheduler("ddim", pipe.scheduler)
    pipe.set_progress_bar_config(disable=True)
    given = {"num_inference_steps": 2, "generator": torch.Generator().manual_seed(0)}
    assert pixels(path) == pipe(PROMPT, negative_prompt="blue", **given).images[0].tobytes()


@pytest.mark.filterwarnings("default::UserWarning")
def test_a_negative_prompt_without_guidance_has_no_effect(model: Path, tmp_path: Path) -> None:
    result = draw(model, tmp_path, "--guidance", 1, "--negative-prompt", "blue")
    assert "warning: negative_prompt has no effect with guidance=1" in result.stderr


def test_a_scheduler_that_does_not_fit_lists_those_that_do(model: Path) -> None:
    from diffusers import DDIMScheduler, DDPMWuerstchenScheduler

    with pytest.raises(elfatt_sd.ElfattError, match="scheduler='ddim' does not fit the model's DDPMWuer"):
        generation.make_scheduler("ddim", DDPMWuerstchenScheduler())
    made = generation.make_scheduler("dpm++", DDIMScheduler(prediction_type="v_prediction"))
    assert (type(made).__name__, made.config.prediction_type) == ("DPMSolverMultistepScheduler", "v_prediction")


@pytest.mark.filterwarnings("default::UserWarning")
def test_what_is_cut_off_a_long_prompt_is_named(model: Path, tmp_path: Path) -> None:
    result = call("generate", "x" * 80, "--model", model, "--steps", 1, "--out", tmp_path)
    assert "warning: the text encoder takes 75 tokens, and the prompt has 80; cut off: 'x" in result.stderr


def test_a_size_that_cannot_fit_is_refused_and_can_be_forced(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("elfatt_sd.budget.memory_of", lambda device: (1000.0, 500.0))
    result = call("generate", PROMPT, "--model", model, "--steps", 1, "--out", tmp_path / "out")
    check_error(result, "an image of 32x32 needs about 0.0 GiB of memory (estimated), and cpu has 0.0 GiB")
    assert files(tmp_path) == []
    draw(model, tmp_path / "out", "--force")


@pytest.mark.filterwarnings("default::UserWarning")
def test_a_comparison_of_identical_images_says_so(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(generation, "psnr", lambda *_: float("inf"))
    result = draw(model, tmp_path, "--compare", "--method", "elfatt-fast", "--active-fraction", 0.01)
    assert "identical: elfatt-fast changed nothing in this run: its first steps are exact. Give active" in result.stdout
    assert "times as fast" not in result.stdout
    assert json.loads((tmp_path / "0001-a-red-star.json").read_text())["identical"] is True


def test_models_for_other_inputs_are_refused_before_a_run(folder: Path) -> None:
    for channels in (5, 7, 8, 9):
        with pytest.raises(elfatt_sd.ElfattError, match=f"the UNet takes {channels} channels, and a StableDiffusion"):
            check_text_to_image(tiny.sd15(folder, in_channels=channels))
    check_text_to_image(tiny.sd15(folder))


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError(), "error: out of memory; give a smaller height and width"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes"),
            "error: out of memory: 4.0 GiB more were asked for; give a smaller",
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0"), "memory: 2.5 GiB more were"),
        (elfatt_sd.config.ElfattFailure("the hub is away."), "error: the hub is away.\n"),
    ],
)
def test_failures_are_told_in_plain_words(model: Path, monkeypatch: Any, error: Exception, says: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("elfatt_sd.pipelines.load_pipeline", fail)
    result = call("patch", model)
    assert result.exit_code == 1
    assert says in result.stderr and result.stderr.count("\n") == 1


def test_completion_is_offered() -> None:
    assert "--install-completion" in call("--help").stdout


def test_try_draws_every_method_and_recommends(model: Path, tmp_path: Path) -> None:
    result = call("try", model, "a", "red", "star", "--steps", 6, "--rounds", 1, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    for method in elfatt_sd.METHODS[1:]:
        assert f"{method}, round 1 of 1" in result.stdout
    assert "PSNR to untouched, dB" in result.stdout
    assert files(tmp_path) == ["0001-a-red-star.json", "0001-a-red-star.png"]


def test_try_takes_methods(model: Path, tmp_path: Path) -> None:
    words = ["--method", "tome", "--method", "elfatt", "--steps", 2, "--rounds", 1, "--out", tmp_path]
    result = call("try", model, "a red star", *words)
    assert re.findall(r"^([a-z-]+), round", result.stdout, re.MULTILINE) == ["untouched", "tome", "elfatt"]
    check_error(call("try", model, "a red star", "--method", "elfat"), "method='elfat' is not known")


def test_try_keeps_what_is_finished_when_it_is_stopped(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    drawn, calls = Studio.draw, []

    def fifth_is_interrupted(self: Studio, *given: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return drawn(self, *given, **named)

    monkeypatch.setattr(Studio, "draw", fifth_is_interrupted)
    result = call("try", model, PROMPT, "--steps", 2, "--out", tmp_path)
    assert result.exit_code == 130
    assert result.stderr == "error: stopped; what was finished stays\n"
    record = json.loads((tmp_path / "0001-a-red-star.json").read_text())
    assert [row["method"] for row in record["methods"]] == ["sd", "tome"]
