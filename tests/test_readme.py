"""README, pages and notebooks: their Python runs, commands and settings exist, and links lead somewhere."""

from __future__ import annotations

import base64
import io
import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from support import tiny_pipelines as tiny
from support import tiny_transformers
from support.checks import like, recorded
from support.commands import ROOT
from typer.testing import CliRunner

from elfatt_sd import loading as pipelines
from elfatt_sd import methods
from elfatt_sd.cli import app
from elfatt_sd.config import METHODS, setting_names
from elfatt_sd.drawing.pictures import fault_of
from elfatt_sd.patch import is_patched
from elfatt_sd.toy.renderer import unknown_words

README = (ROOT / "README.md").read_text()
DOCS = ROOT / "docs"
RESULTS = [ROOT / folder / "results/README.md" for folder in ("eval", "benchmarks")]
PAGES = [*ROOT.glob("*.md"), *DOCS.glob("*.md"), *ROOT.glob("eval/*.md"), *ROOT.glob("tools/*.md"), *RESULTS]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def test_what_is_needed_first_comes_first() -> None:
    order = ["pip install", "elfatt_sd.apply_patch(pipe", "elfatt_sd.remove_patch(pipe", "closeness (PSNR)"]
    places = [README.index(said) for said in [*order, "headline.png", "**Not measured:**", "elfatt-sd generate"]]
    assert places == sorted(places)
    assert len(README.splitlines()) <= 120


@pytest.mark.parametrize("name", ["README.md", "docs/start.md", "docs/choose.md"])
def test_the_python_runs(folder: Path, monkeypatch: Any, tmp_path: Path, name: str) -> None:
    monkeypatch.setenv("ELFATT_SD_CACHE", str(tmp_path))
    pipe = tiny.sd15(folder)
    monkeypatch.setattr(pipelines, "load_pipeline", lambda *_, **__: pipe)
    names: dict[str, Any] = {"pipe": pipe}
    for block in blocks(ROOT / name):
        exec(block, names)
    assert is_patched(pipe)
    if "squares" in names:
        assert pipe.unet.elfatt_patch.config.phases[-1] == names["squares"]
    else:
        assert names["image"].size == (32, 32)


def test_the_page_on_ones_own_attention_runs(folder: Path, monkeypatch: Any) -> None:
    """As many lines as it promises, and every block of them."""
    monkeypatch.setattr(pipelines, "load_pipeline", lambda *_, **__: tiny.sd15(folder))
    monkeypatch.setattr(methods, "_known", dict(methods._known))
    names: dict[str, Any] = {"__name__": "__main__"}
    found = blocks(DOCS / "your-own-attention.md")
    assert len([line for line in found[0].splitlines() if line.strip()]) <= 30
    for block in found:
        exec(block, names)
    assert names["late"].phases[1].attention.height == 8
    assert names["image"].size == (32, 32)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


def commands() -> list[str]:
    lines = [line for page in PAGES for line in page.read_text().splitlines()]
    found = [line.partition("#")[0].strip() for line in lines if re.match(r"\s*(elfatt-sd|python cli\.py) ", line)]
    return sorted(set(found))


@pytest.mark.parametrize("command", commands())
def test_commands_exist_with_their_options(command: str) -> None:
    words = shlex.split(command.replace("...", "").rstrip("\\"))
    words = words[1:] if words[0] == "elfatt-sd" else words[2:]
    depth = 2 if words[0] in ("eval", "bench") else 1
    shown = CliRunner().invoke(app, [*words[:depth], "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    for option in (word for word in words if word.startswith("--")):
        assert re.search(rf"{re.escape(option)}\b", shown.output), f"{option} is no option of {words[:depth]}"


def test_every_method_is_described_and_every_setting_exists() -> None:
    page = (DOCS / "choose.md").read_text()
    table = page.split("## Methods")[1].split("##")[0]
    assert re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE) == list(METHODS)
    settings = page.split("| setting | meaning |")[1].split("##")[0]
    named = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| ([^|]+) \|", settings, re.MULTILINE))))
    assert named
    assert named <= set(setting_names())


def test_the_tested_versions_are_the_pinned_ones() -> None:
    for file in ("constraints.txt", "constraints-oldest.txt"):
        pins = dict(re.findall(r"^([\w-]+)==(.+)$", (ROOT / file).read_text(), re.MULTILINE))
        for page in (README, (DOCS / "compatibility.md").read_text()):
            said = " ".join(page.split())
            found = re.search(
                rf"diffusers {re.escape(pins['diffusers'])}(?: with|,) torch ([\d.]+) and transformers ([\d.]+)", said
            )
            assert found is not None
            short = [".".join(pins[package].split(".")[:2]) for package in ("torch", "transformers")]
            assert [version.rstrip(".") for version in found.groups()] == short


HOWTO = (DOCS / "howto.md").read_text()
SECTIONS = re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", HOWTO, re.MULTILINE | re.DOTALL)
SMALL = {"height": 32, "width": 32}
JOINT = {
    "StableDiffusion3Pipeline": tiny_transformers.sd3,
    "QwenImagePipeline": tiny_transformers.qwen_image,
    "WanPipeline": tiny_transformers.wan,
}


def build(kind: Any, folder: Path, parts: dict[str, Any]) -> tuple[Any, Any]:
    """A small pipeline, and how it draws if it has no text encoder."""
    if kind.__name__ in JOINT:
        return JOINT[kind.__name__]()
    if kind is diffusers.FluxPipeline:
        return tiny_transformers.flux(folder), None
    if kind is diffusers.StableDiffusionXLPipeline:
        return tiny.sdxl(folder), None
    return like(kind, tiny.sd15(folder), **parts), None


@pytest.fixture
def small(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths lead to small random pipelines; sizes and steps are small, and nothing is compiled or moved."""

    def load(kind: Any, *_: Any, controlnet: Any = None, **__: Any) -> Any:
        pipe, run = build(kind, folder, {"controlnet": controlnet} if controlnet else {})
        original = type(pipe).__call__

        def call(self: Any, *prompts: Any, **given: Any) -> Any:
            if "prompt_embeds" in given:
                return original(self, **given)
            if run is not None:
                return SimpleNamespace(images=(drawn := run(num_inference_steps=5)), frames=drawn)
            sizes = {} if "strength" in given else SMALL
            return original(self, *prompts, **{**sizes, **given, "num_inference_steps": 5, "output_type": "latent"})

        monkeypatch.setattr(type(pipe), "__call__", call)
        return pipe

    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", classmethod(load))
    monkeypatch.setattr(diffusers.DiffusionPipeline, "to", lambda self, *_: self)
    monkeypatch.setattr(diffusers.DiffusionPipeline, "enable_model_cpu_offload", lambda self: None)
    monkeypatch.setattr(diffusers.StableDiffusionPipeline, "load_lora_weights", lambda self, path: None)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: None)
    control = classmethod(lambda *_: tiny.controlnet(tiny.unet()))
    monkeypatch.setattr(diffusers.ControlNetModel, "from_pretrained", control)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("title", "text"), SECTIONS, ids=[title for title, _ in SECTIONS])
def test_the_section_runs(title: str, text: str) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    drawing = Image.new("RGB", (32, 32))
    names: dict[str, Any] = {"__name__": "howto", "edges": drawing, "photo": drawing}
    with recorded() as calls:
        exec(code, names)
    assert calls, f"nothing was approximated in {title!r}"
    assert is_patched(names["pipe"]) == ("remove_patch" not in code)


def test_every_pipeline_that_was_promised_has_its_section() -> None:
    said = " ".join(title for title, _ in SECTIONS)
    kinds = ["1.5", "SDXL", "Flux", "3.5", "Qwen", "Wan", "ControlNet", "Image to image", "LoRA"]
    for word in [*kinds, "Compile", "Offload", "GPUs", "threads"]:
        assert word in said


NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
QUICKSTART = ROOT / "notebooks" / "1-quickstart.ipynb"


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def outputs(path: Path) -> list[dict[str, Any]]:
    return [output for cell in code_cells(path) for output in cell["outputs"]]


def test_the_quickstart_shows_its_pictures() -> None:
    """After a change: `make quickstart`."""
    cells = code_cells(QUICKSTART)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    encoded = [output["data"]["image/jpeg"] for output in outputs(QUICKSTART) if "image/jpeg" in output.get("data", {})]
    pictures = [Image.open(io.BytesIO(base64.b64decode(data))) for data in encoded]
    assert [picture.width // 256 for picture in pictures] == [1, 2, 6, 2]
    assert not any(fault_of(np.asarray(picture.convert("RGB"), dtype=float)) for picture in pictures)
    assert QUICKSTART.stat().st_size < 400_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_know_the_toy_s_words_and_hold_no_error_no_warning_and_no_place(path: Path) -> None:
    code = "".join("".join(cell["source"]) for cell in code_cells(path))
    for prompt in re.findall(r'"(an? [^"]+ background)"', code):
        assert not unknown_words(prompt), prompt
    for output in outputs(path):
        assert output["output_type"] != "error"
        assert output.get("name") != "stderr"
        text = json.dumps([output.get("text"), output.get("data", {}).get("text/plain")])
        assert not re.search(r"warning|(^|[\s'\"(=])(~|file:/)?/\w", text, re.IGNORECASE), text
