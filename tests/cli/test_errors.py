"""Every bad input is one line, told before anything heavy, and leaves nothing behind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny_pipelines as tiny
import torch
from cli_checks import PROMPT, ROOT, call, check_error, draw, files
from PIL import Image

import elfatt_sd
from elfatt_sd.files import check_writable
from elfatt_sd.generation import Studio
from elfatt_sd.running import check_text_to_image

pytestmark = pytest.mark.usefixtures("library_chatter")


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


def test_no_prompt_and_an_empty_file(model: Path, tmp_path: Path) -> None:
    check_error(call("generate", "--model", model, "--out", tmp_path / "out"), "there is no prompt")
    (tmp_path / "empty.txt").write_text(" \n\n")
    result = call("generate", "--prompt-file", tmp_path / "empty.txt", "--model", model, "--out", tmp_path / "out")
    check_error(result, "is empty; give a text file with one prompt a line")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    result = call("generate", "--prompt-file", tmp_path / "latin.txt", "--model", model, "--out", tmp_path / "out")
    check_error(result, "not UTF-8 text")
    result = call("generate", "--prompt-file", "/dev/zero", "--model", model, "--out", tmp_path / "out")
    check_error(result, "prompt_file='/dev/zero' is larger than 64 MiB")
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


def test_processes_of_one_launch_may_check_a_new_folder_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(check_writable, [folder] * 200))
    assert not (tmp_path / "a").exists()


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
    ["try", "sdxl"],
    ["bench", "unet", "--model", "toyy"],
    ["bench", "unet", "--model", "toy", "--variant", "fp16"],
    ["bench", "unet", "--variant", "fp16"],
    ["bench", "unet", "--method", "faster"],
    ["bench", "unet", "--size", "-8"],
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
    ["eval", "run", "toy", "--out", "runs/none", "--set", "height=8"],
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
    ["bench", "merging", "--dtype", "int3"],
    ["bench", "layer", "--tokens", "5"],
    ["bench", "layer", "--block-size", "0"],
    ["bench", "growth", "--device", "abacus"],
    ["bench", "orders", "--record-at", "99"],
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
def test_a_size_that_cannot_fit_is_warned_of_and_fails_in_one_line(model: Path, tmp_path: Path) -> None:
    side = 2**23
    words = ["--model", model, "--steps", 1, "--out", tmp_path / "out", "--height", side, "--width", side]
    result = call("generate", PROMPT, *words)
    assert result.exit_code == 1
    warning, error = result.stderr.splitlines()
    assert warning.startswith(f"warning: an image of {side}x{side} needs about ") and "are free on cpu" in warning
    assert error.startswith("error: out of memory: ") and "give a smaller height and width" in error
    assert files(tmp_path) == []


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
