"""`elfatt-sd generate`: what it writes, what it prints, and what it explains."""

from __future__ import annotations

import json
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from support.checks import set_clock
from support.commands import PROMPT, break_decoder, call, draw, files, pixels

import elfatt_sd
from elfatt_sd.drawing import compare as comparing
from elfatt_sd.drawing import studio as generation
from elfatt_sd.drawing.studio import Request, Studio, free_name
from elfatt_sd.runtime.autotune import Decision, Tuner
from elfatt_sd.runtime.call import LayerCall

pytestmark = pytest.mark.usefixtures("library_chatter")


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
    words = ["--agents", 9, "--no-rand", "--block-order", "spread", "--patch-seed", 5]
    words += ["--seed", 3, "--device", "cpu", "--negative-prompt", "blue", "--scheduler", "ddim"]
    draw(model, tmp_path, *words)
    path = tmp_path / "0001-a-red-star.png"
    record = json.loads(path.with_suffix(".json").read_text())
    assert (record["negative_prompt"], record["scheduler"]) == ("blue", "DDIMScheduler")
    pipe = elfatt_sd.load_pipeline(model, device="cpu")
    pipe.scheduler = generation.make_scheduler("ddim", pipe.scheduler)
    pipe.set_progress_bar_config(disable=True)

    def drawn() -> bytes:
        given = {"num_inference_steps": 2, "generator": torch.Generator().manual_seed(3)}
        picture: Image.Image = pipe(PROMPT, negative_prompt="blue", **given).images[0]
        return picture.tobytes()

    elfatt_sd.apply_patch(pipe, "elfatt", agents=9, use_rand=False, block_order="spread", seed=5)
    assert pixels(path) == drawn()
    elfatt_sd.remove_patch(pipe)
    assert pixels(path) != drawn()


def test_pictures_count_seeds_up_do_not_depend_on_each_other_and_replace_none(model: Path, tmp_path: Path) -> None:
    (tmp_path / "0007-mine.png").write_bytes(b"mine")
    draw(model, tmp_path, "--num-images", 2, "--seed", 4)
    draw(model, tmp_path, "--seed", 5)
    mine, first, second, again = sorted(tmp_path.glob("*.png"))
    assert again.name == "0010-a-red-star.png" and mine.read_bytes() == b"mine"
    assert [json.loads(path.with_suffix(".json").read_text())["seed"] for path in (first, second)] == [4, 5]
    assert pixels(second) == pixels(again) != pixels(first)


def test_compare_shows_both_and_says_how_they_differ(model: Path, tmp_path: Path) -> None:
    result = draw(model, tmp_path, "--compare", "--height", 64, "--width", 48)
    assert "times as fast (between two untouched runs, after a warm-up); PSNR" in result.stdout
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


def test_a_method_may_be_sd_with_settings(model: Path, tmp_path: Path) -> None:
    result = draw(model, tmp_path, "--compare", "--method", "sd", "--attention-backend", "native")
    assert "identical: sd with settings changed nothing in this run" in result.stdout
    assert files(tmp_path) == ["0001-a-red-star.json", "0001-a-red-star.png"]


@pytest.mark.parametrize(("last", "told"), [(2.2, False), (6.0, True)])
def test_each_patched_image_stands_between_untouched_ones(
    pipe: Any, tmp_path: Path, monkeypatch: Any, last: float, told: bool
) -> None:
    set_clock(monkeypatch, [9, 9, 2, 1, 2, 1, last])  # two warm-ups; an untouched image is of both its neighbours
    labels: list[tuple[str, str]] = []
    side_by_side = comparing.side_by_side

    def keep(pictures: Any, captions: Any, title: str) -> Any:
        labels.extend(captions)
        return side_by_side(pictures, captions, title)

    monkeypatch.setattr(comparing, "side_by_side", keep)
    before = dict(pipe.unet.attn_processors)
    request = Request((PROMPT,), elfatt_sd.PatchConfig.preset("tome"), steps=1, num_images=2, compare=True)
    first, second = comparing.compared(Studio(pipe, request, tmp_path))
    assert pipe.unet.attn_processors == before
    record = json.loads(first.path.with_suffix(".json").read_text())
    close = f"2.00 times as fast, PSNR {record['psnr_db']:.1f} dB"
    assert labels[:2] == [("untouched, 2.00 s", ""), ("tome, 1.00 s", close)]
    assert "untouched 2.00 s" in first.summary() and f"untouched {(2 + last) / 2:.2f} s" in second.summary()
    assert "patched 1.00 s: 2.00 times as fast" in first.summary() and "busy" not in first.summary()
    assert ("the machine was busy: equal runs took 2.00 to 6.00 s" in second.summary()) == told
    record = json.loads(second.path.with_suffix(".json").read_text())
    assert record["speed_ratios"] == pytest.approx([2, last])
    assert record["speed_ratio"] == pytest.approx(1 + last / 2)


def test_a_terminal_shows_progress(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = draw(model, tmp_path, "--num-images", 2).stderr
    assert "image 2 of 2" in shown
    assert "4/4 steps" in shown


@pytest.mark.filterwarnings("default")
def test_a_long_list_of_prompts_is_told_of_in_a_line(model: Path, tmp_path: Path) -> None:
    words = ["", "  a grüne ring ", *("abcdefgh"[number] * 90 for number in range(8))]
    (tmp_path / "prompts.txt").write_text("\n".join(words), encoding="utf-8-sig")
    shown = draw(model, tmp_path / "out", "--prompt-file", tmp_path / "prompts.txt", "--steps", 1).stderr
    assert shown.count("cut off") == 1
    cut = (
        "8 of 10 prompts are cut off: the text encoder takes 75 tokens, and the first of them has 90, without 'aaaaaaa"
    )
    assert cut in shown
    pictures = sorted((tmp_path / "out").glob("*.png"))
    assert [metadata(path)["prompt"] for path in pictures] == [PROMPT, "a grüne ring", *words[2:]]


def test_images_that_are_written_are_let_go(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """There may be more of them than memory holds."""
    alive: list[int] = []
    made: list[weakref.ref[Any]] = []
    draw_one = Studio.draw

    def counting(studio: Studio, *given: Any) -> Any:
        alive.append(sum(picture() is not None for picture in made))
        shot = draw_one(studio, *given)
        made.append(weakref.ref(shot.pixels))
        return shot

    monkeypatch.setattr(Studio, "draw", counting)
    draw(model, tmp_path, "--num-images", 5, "--steps", 1)
    assert alive[-1] <= 1


def test_a_comparison_measures_the_size_that_it_draws(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    measured: set[tuple[int, ...]] = set()

    def decide(tuner: Tuner, state: LayerCall, phase: elfatt_sd.Phase, sample: torch.Tensor) -> Decision:
        measured.add(state.grid)
        return Decision(0.5, 0.4, 0.6)

    monkeypatch.setattr(Tuner, "decide", decide)
    draw(model, tmp_path, "--autotune", "--compare", "--height", 64, "--width", 48)
    assert measured == {(1, 32, 24)}


def test_autotune_is_passed_on(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("ELFATT_SD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("elfatt_sd.runtime.autotune.timed", lambda *_: 1.0)  # a decision is kept where rounds agree
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


@pytest.mark.parametrize(("value", "says"), [(0.0, "is of one colour"), (math.nan, "is not finite")])
def test_what_is_no_image_is_pointed_out_and_not_compared(
    model: Path, tmp_path: Path, value: float, says: str, monkeypatch: Any
) -> None:
    pipe = break_decoder(elfatt_sd.load_pipeline(model, device="cpu"), value)
    monkeypatch.setattr("elfatt_sd.loading.load_pipeline", lambda *_, **__: pipe)
    plain = draw(model, tmp_path)
    assert f"0001-a-red-star.png: the image {says}" in plain.stderr
    compared = draw(model, tmp_path, "--compare", "--method", "tome")
    assert f"the untouched image {says}" in compared.stderr and "not compared (untouched" in compared.stdout
    assert "PSNR" not in compared.stdout
    record = json.loads((tmp_path / "0002-a-red-star.json").read_text())
    assert (record["psnr_db"], record["identical"]) == (None, False)
    check = call("try", model, PROMPT, "--steps", 2, "--out", tmp_path)
    assert check.exit_code == 2 and f"error: the untouched image {says}" in check.stderr


def test_the_toy_names_the_words_it_knows(pipe: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("elfatt_sd.loading.load_pipeline", lambda *_, **__: pipe)
    result = call("generate", "a purple cat", "--steps", 1, "--out", tmp_path)
    assert result.exit_code == 0
    assert result.stderr.startswith("note: the toy does not know 'cat'; it draws one of circle, square")
    assert "--model" in result.stderr
    assert call("generate", "a purple star", "--steps", 1, "--out", tmp_path).stderr == ""


@pytest.mark.parametrize(("name", "expected"), [("toy", (25, 3)), ("toy-dit", (12, 1)), ("owner/another", (50, 7.5))])
def test_steps_and_guidance_that_are_not_given(pipe: Any, tmp_path: Path, name: str, expected: Any) -> None:
    studio = Studio(pipe, Request((PROMPT,), elfatt_sd.PatchConfig.preset("sd"), model=name), tmp_path)
    assert (studio.steps, studio.guidance) == expected


def test_names_are_safe_and_short(tmp_path: Path) -> None:
    assert free_name(tmp_path, "../../etc: Ünï/\\*?").name == "0001-etc-ünï.png"
    assert free_name(tmp_path, "???").name == "0001-picture.png"
    assert len(free_name(tmp_path, "word " * 100).name) < 80


@pytest.mark.filterwarnings("default::UserWarning")
def test_a_comparison_of_identical_images_says_so(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(comparing, "psnr", lambda *_: float("inf"))
    result = draw(model, tmp_path, "--compare", "--method", "elfatt-fast", "--active-fraction", 0.01)
    assert "identical: elfatt-fast changed nothing in this run, of which it approximates no step" in result.stdout
    assert "times as fast" not in result.stdout
    assert json.loads((tmp_path / "0001-a-red-star.json").read_text())["identical"] is True


def test_words_without_quotes_are_drawn_where_each_is_meant(model: Path, tmp_path: Path) -> None:
    result = call("generate", "a", "red", "--model", model, "--steps", 1, "--out", tmp_path, "--each")
    assert (result.exit_code, result.stderr) == (0, "")
    assert len(list(tmp_path.glob("*.png"))) == 2


def test_what_was_seen_is_written_beside_each_image(model: Path, tmp_path: Path) -> None:
    words = ["--method", "tome", "--num-images", 2, "--compare", "--step", 2]
    result = draw(model, tmp_path, *words, "--explain")
    written = [name for name in files(tmp_path) if "explained" in name]
    assert written == ["0001-a-red-star-explained-step-2.png", "0002-a-red-star-explained-step-2.png"]
    assert all(str(tmp_path / name) in result.stdout for name in written)
    with Image.open(tmp_path / written[0]) as image:
        assert image.width > 1000


def test_several_layers_have_files_of_their_own(model: Path, tmp_path: Path) -> None:
    draw(model, tmp_path, "--method", "tome", "--explain", "--layer", "up_blocks.*", "--step", 1, "--at", "0.1,0.9")
    written = [name for name in files(tmp_path) if "explained" in name]
    assert written[0] == "0001-a-red-star-explained-layer-1-step-1.png" and len(written) > 1
