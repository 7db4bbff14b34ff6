"""`elfatt-sd generate`: what it writes, what it prints, and what it explains."""

from __future__ import annotations

import json
import math
import weakref
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image, ImageOps
from support.checks import counting, set_clock
from support.commands import PROMPT, break_decoder, call, draw, files, pixels

import elfatt_sd
from elfatt_sd.drawing import compare as comparing
from elfatt_sd.drawing.studio import Request, Studio
from elfatt_sd.loading import make_scheduler
from elfatt_sd.runtime.autotune import Tuner

pytestmark = pytest.mark.usefixtures("library_chatter")
FIRST = "0001-a-red-star"


def record_of(path: Path) -> dict[str, Any]:
    """What is written beside an image, which has it inside as well."""
    record: dict[str, Any] = json.loads(path.with_suffix(".json").read_text())
    with Image.open(path) as picture:
        picture.load()
        inside = picture.info
    assert inside["prompt"] == record["prompt"] and json.loads(inside["config"]) == record["config"]
    assert json.loads(inside["versions"])["torch"] == torch.__version__
    return record


def test_generate_draws_what_python_draws_and_writes_its_settings(model: Path, tmp_path: Path) -> None:
    words = ["--agents", 9, "--no-rand", "--block-order", "spread", "--patch-seed", 5, "--guidance", 3]
    words += ["--seed", 3, "--device", "cpu", "--negative-prompt", "blue", "--scheduler", "ddim"]
    result = draw(model, tmp_path / "new" / "out", *words)
    assert files(tmp_path / "new" / "out") == [f"{FIRST}.json", f"{FIRST}.png"]
    path = tmp_path / "new" / "out" / f"{FIRST}.png"
    assert str(path) in result.stdout
    assert "peak memory" in result.stdout.splitlines()[-1] and "VmHWM" not in result.stdout
    record, settings = record_of(path), {"agents": 9, "use_rand": False, "block_order": "spread", "seed": 5}
    config = elfatt_sd.PatchConfig.preset("elfatt", **settings)
    assert elfatt_sd.PatchConfig.from_dict(record["config"]) == config
    expected = {"prompt": PROMPT, "seed": 3, "steps": 2, "guidance": 3.0, "method": "elfatt", "negative_prompt": "blue"}
    assert {**record, **expected, "scheduler": "DDIMScheduler"} == record
    assert record["seconds"] > 0
    assert record["peak_memory_bytes"] is None or record["peak_memory_bytes"] > 1e6
    pipe = elfatt_sd.load_pipeline(model, device="cpu")
    pipe.scheduler = make_scheduler("ddim", pipe.scheduler)
    pipe.set_progress_bar_config(disable=True)

    def drawn() -> bytes:
        given = {"num_inference_steps": 2, "guidance_scale": 3.0, "generator": torch.Generator().manual_seed(3)}
        picture: Image.Image = pipe(PROMPT, negative_prompt="blue", **given).images[0]
        return picture.tobytes()

    elfatt_sd.apply_patch(pipe, config)
    assert pixels(path) == drawn()
    elfatt_sd.remove_patch(pipe)
    assert pixels(path) != drawn()


@pytest.mark.filterwarnings("default")
def test_an_image_and_loras_are_drawn_with_as_in_python(model: Path, lora: Path, tmp_path: Path) -> None:
    """And told as one document of JSON; what is said otherwise goes to the other stream."""
    photo = tmp_path / "photo.png"
    Image.radial_gradient("L").resize((50, 43)).save(photo)
    words = ["--lora", f"{lora.parent}:0.5", "--lora", lora, "--image", photo, "--strength", 0.6, "--steps", 5]
    result = draw(model, tmp_path / "out", *words, "--method", "tome", "--explain", "--step", 4, "--json")
    data = json.loads(result.stdout)
    [drawn], [explained] = data["images"], data["explained"]
    assert drawn == {"path": drawn["path"], **record_of(Path(drawn["path"])), "fault": None}
    given = {"image": str(photo), "strength": 0.6, "lora": [f"{lora.parent}:0.5", str(lora)], "width": 48, "height": 40}
    assert drawn | given == drawn and Path(explained).exists()
    said = ("image of 50x43 is cut and resized to 48x40", drawn["path"], explained)
    assert all(each in result.stderr for each in said)
    pipe = diffusers.AutoPipelineForImage2Image.from_pipe(elfatt_sd.load_pipeline(model, device="cpu"))
    for name in ("one", "two"):
        pipe.load_lora_weights(lora.parent, weight_name=lora.name, adapter_name=name)
    pipe.set_adapters(["one", "two"], [0.5, 1.0])
    elfatt_sd.apply_patch(pipe, "tome")
    with Image.open(photo) as image:
        cut = ImageOps.fit(image.convert("RGB"), (48, 40))
    own = pipe(PROMPT, image=cut, strength=0.6, num_inference_steps=5, generator=torch.Generator().manual_seed(0))
    assert pixels(Path(drawn["path"])) == own.images[0].tobytes()


def test_pictures_count_seeds_up_do_not_depend_on_each_other_and_replace_none(model: Path, tmp_path: Path) -> None:
    (tmp_path / "0007-mine.png").write_bytes(b"mine")
    draw(model, tmp_path, "--num-images", 2, "--seed", 4)
    draw(model, tmp_path, "--seed", 5)
    mine, first, second, again = sorted(tmp_path.glob("*.png"))
    assert again.name == "0010-a-red-star.png" and mine.read_bytes() == b"mine"
    assert [record_of(path)["seed"] for path in (first, second)] == [4, 5]
    assert pixels(second) == pixels(again) != pixels(first)


@pytest.mark.filterwarnings("default")
def test_prompts_come_from_words_and_files(model: Path, tmp_path: Path) -> None:
    """Those that are too long are told of in one line, and words without quotes are drawn where each is meant."""
    lines = ["", "  a grüne ring ", *("abcd"[number] * 90 for number in range(4))]
    (tmp_path / "prompts.txt").write_text("\n".join(lines), encoding="utf-8-sig")
    words = ["a", "red", "--each", "--model", model, "--prompt-file", tmp_path / "prompts.txt", "--steps", 1]
    result = call("generate", *words, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert result.stderr.count("cut off") == 1
    assert "4 of 7 prompts are cut off: the text encoder takes 75 tokens, and the first of them has 90" in result.stderr
    pictures = sorted((tmp_path / "out").glob("*.png"))
    assert [record_of(path)["prompt"] for path in pictures] == ["a", "red", "a grüne ring", *lines[2:]]


def test_compare_shows_the_untouched_image_beside_it(model: Path, tmp_path: Path) -> None:
    draw(model, tmp_path, "--compare", "--height", 64, "--width", 48)
    path = tmp_path / f"{FIRST}.png"
    record = record_of(path)
    assert record["speed_ratio"] == pytest.approx(record["untouched_seconds"] / record["seconds"])
    draw(model, tmp_path / "sd", "--method", "sd", "--height", 64, "--width", 48)
    with Image.open(path) as sheet:
        columns = [sheet.crop((16, top, 16 + 48, top + 64)).tobytes() for top in range(sheet.height - 64)]
    assert pixels(tmp_path / "sd" / f"{FIRST}.png") in columns
    text = path.with_suffix(".html").read_text(encoding="utf-8")
    assert text.count('type="range"') == 1 and "PSNR" in text and "https://" not in text
    result = call("generate", PROMPT, "--model", model, "--compare", "--out", tmp_path / "auto")
    said, error = result.stderr.splitlines()
    assert said.startswith("auto: untouched; elfatt-fast, 1.") and not files(tmp_path / "auto")
    assert error.startswith("error: the pipeline stays untouched (method='sd'), which is nothing to compare with; give")
    result = draw(model, tmp_path / "same", "--compare", "--method", "sd", "--attention-backend", "native")
    assert "identical: sd, with settings changed nothing in this run" in result.stdout
    assert "times as fast" not in result.stdout and record_of(tmp_path / "same" / f"{FIRST}.png")["identical"] is True


def test_each_patched_image_stands_between_untouched_ones(pipe: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Two warm-ups; the second untouched image is of both its neighbours. The machine is busy at the end."""
    set_clock(monkeypatch, [9, 9, 2, 1, 2, 1, 6])
    request = Request((PROMPT,), elfatt_sd.PatchConfig.preset("tome"), steps=1, num_images=2, compare=True)
    first, second = comparing.compared(Studio(pipe, request, tmp_path))
    assert not elfatt_sd.is_patched(pipe)
    assert "untouched 2.00 s, patched 1.00 s: 2.00 times as fast (between" in first.figures
    assert "untouched 4.00 s" in second.figures and "busy" not in first.figures
    assert "the machine was busy: equal runs took 2.00 to 6.00 s" in second.figures
    record = record_of(second.path)
    assert (record["speed_ratios"], record["speed_ratio"]) == (pytest.approx([2, 6]), pytest.approx(4))


def test_images_that_are_written_are_let_go(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """There may be more of them than memory holds; a terminal shows how many there are."""
    alive: list[int] = []
    made: list[weakref.ref[Any]] = []
    draw_one = Studio.draw

    def counting(studio: Studio, *given: Any) -> Any:
        alive.append(sum(picture() is not None for picture in made))
        shot = draw_one(studio, *given)
        made.append(weakref.ref(shot.pixels))
        return shot

    monkeypatch.setattr(Studio, "draw", counting)
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = draw(model, tmp_path, "--num-images", 5, "--steps", 1).stderr
    assert alive[-1] <= 1 and "image 5 of 5" in shown and "5/5 steps" in shown


def test_autotune_measures_the_size_that_is_drawn(
    model: Path, tmp_path: Path, own_cache: Path, monkeypatch: Any
) -> None:
    measured = counting(monkeypatch, Tuner, "decide", lambda tuner, state, *_: state.grid)
    monkeypatch.setattr("elfatt_sd.runtime.autotune.timed", lambda *_: 1.0)  # a decision is kept where rounds agree
    draw(model, tmp_path / "out", "--autotune", "--compare", "--height", 64, "--width", 48)
    assert {*measured} == {(1, 32, 24)} and record_of(tmp_path / "out" / f"{FIRST}.png")["autotune"] is True
    assert (own_cache / "autotune.json").exists()
    words = ["--method", "elfatt", "--autotune", "--json", "--height", 64, "--width", 48]
    data = json.loads(call("patch", model, *words).stdout)
    assert data["python"][-1].endswith(", autotune=True)")
    assert any("measured here" in layer["reason"] for layer in data["layers"])


def test_what_is_no_image_is_pointed_out_and_not_compared(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    pipe = break_decoder(elfatt_sd.load_pipeline(model, device="cpu"), math.nan)
    monkeypatch.setattr("elfatt_sd.loading.load_pipeline", lambda *_, **__: pipe)
    assert f"{FIRST}.png: the image is not finite" in draw(model, tmp_path).stderr
    compared = draw(model, tmp_path, "--compare", "--method", "tome")
    assert "the untouched image is not finite" in compared.stderr and "not compared (untouched" in compared.stdout
    record = record_of(tmp_path / "0002-a-red-star.png")
    assert (record["psnr_db"], record["identical"]) == (None, False)
    tried = call("try", model, PROMPT, "--steps", 2, "--out", tmp_path)
    assert tried.exit_code == 2 and "error: the untouched image is not finite" in tried.stderr


def test_the_toy_names_the_words_it_knows(pipe: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("elfatt_sd.loading.load_pipeline", lambda *_, **__: pipe)
    words = ["--method", "tome", "--steps", 1, "--out", tmp_path]
    result = call("generate", "a purple cat", *words)
    assert result.exit_code == 0
    assert result.stderr.startswith("note: the toy does not know 'cat'; it draws one of circle, square")
    assert call("generate", "a purple star", *words).stderr == ""


def test_what_was_seen_is_written_beside_each_image(model: Path, tmp_path: Path) -> None:
    words = ["--method", "tome", "--explain"]
    result = draw(model, tmp_path / "a", *words, "--num-images", 2, "--compare", "--step", 2)
    written = [name for name in files(tmp_path / "a") if "explained" in name]
    assert written == ["0001-a-red-star-explained-step-2.png", "0002-a-red-star-explained-step-2.png"]
    assert all(str(tmp_path / "a" / name) in result.stdout for name in written)
    with Image.open(tmp_path / "a" / written[0]) as image:
        assert image.width > 1000
    draw(model, tmp_path / "b", *words, "--layer", "up_blocks.*", "--step", 1, "--at", "0.1,0.9")
    written = [name for name in files(tmp_path / "b") if "explained" in name]
    assert written[0] == "0001-a-red-star-explained-layer-1-step-1.png" and len(written) > 1
