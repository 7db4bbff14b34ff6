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

README, DOCS = (ROOT / "README.md").read_text(), ROOT / "docs"
RESULTS = [ROOT / folder / "results/README.md" for folder in ("eval", "benchmarks")]
PAGES = [*ROOT.glob("*.md"), *DOCS.glob("*.md"), *ROOT.glob("eval/*.md"), *ROOT.glob("tools/*.md"), *RESULTS]


def blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", ["README.md", "docs/start.md", "docs/choose.md", "docs/your-own-attention.md"])
def test_the_python_runs(folder: Path, monkeypatch: Any, tmp_path: Path, name: str) -> None:
    """The page on one's own attention has as many lines as it promises."""
    monkeypatch.setenv("ELFATT_SD_CACHE", str(tmp_path))
    monkeypatch.setattr(methods, "_known", dict(methods._known))
    pipe, found = tiny.sd15(folder), blocks((ROOT / name).read_text())
    own = "own" in name
    monkeypatch.setattr(pipelines, "load_pipeline", lambda *_, **__: tiny.sd15(folder) if own else pipe)
    names: dict[str, Any] = {"__name__": "__main__"} if own else {"pipe": pipe}
    for block in found:
        exec(block, names)
    if own:
        assert len([line for line in found[0].splitlines() if line.strip()]) <= 30
        assert names["late"].phases[1].attention.height == 8
    elif "squares" in names:
        assert pipe.unet.elfatt_patch.config.phases[-1] == names["squares"]
    else:
        assert is_patched(pipe)
    assert "squares" in names or names["image"].size == (32, 32)


def test_pages_are_in_order_and_links_lead_somewhere() -> None:
    """What is needed first comes first."""
    order = ["pip install", "elfatt_sd.apply_patch(pipe", "elfatt_sd.remove_patch(pipe", "closeness (PSNR)"]
    places = [README.index(said) for said in [*order, "headline.png", "**Not measured:**", "elfatt-sd generate"]]
    assert places == sorted(places) and len(README.splitlines()) <= 120
    for page in PAGES:
        links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
        assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == [], page


def test_commands_exist_with_their_options() -> None:
    lines = {line.partition("#")[0].strip() for page in PAGES for line in page.read_text().splitlines()}
    helps: dict[tuple[str, ...], str] = {}
    for line in sorted(line for line in lines if re.match(r"(elfatt-sd|python cli\.py) ", line)):
        words = shlex.split(line.replace("...", "").rstrip("\\"))
        words = words[1:] if words[0] == "elfatt-sd" else words[2:]
        command = tuple(words[: 2 if words[0] in ("eval", "bench") else 1])
        if command not in helps:
            shown = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200"})
            assert shown.exit_code == 0, f"{line}: {shown.output}"
            helps[command] = shown.output
        for option in (word for word in words if word.startswith("--")):
            assert re.search(rf"{re.escape(option)}\b", helps[command]), f"{option} is no option of {line}"
    assert len(helps) > 6


def test_methods_settings_and_tested_versions_are_those_that_there_are() -> None:
    page = (DOCS / "choose.md").read_text()
    table = page.split("## Methods")[1].split("##")[0]
    assert re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE) == list(METHODS)
    settings = page.split("| setting | meaning |")[1].split("##")[0]
    named = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| ([^|]+) \|", settings, re.MULTILINE))))
    assert named and named <= set(setting_names())
    for file in ("constraints.txt", "constraints-oldest.txt"):
        pins = dict(re.findall(r"^([\w-]+)==(.+)$", (ROOT / file).read_text(), re.MULTILINE))
        short = [".".join(pins[package].split(".")[:2]) for package in ("torch", "transformers")]
        tested = rf"diffusers {re.escape(pins['diffusers'])}(?: with|,) torch ([\d.]+) and transformers ([\d.]+)"
        for page in (README, (DOCS / "compatibility.md").read_text()):
            found = re.search(tested, " ".join(page.split()))
            assert found is not None and [version.rstrip(".") for version in found.groups()] == short


SECTIONS = re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", (DOCS / "howto.md").read_text(), re.MULTILINE | re.DOTALL)
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
    (code,), drawing = blocks(text), Image.new("RGB", (32, 32))
    names: dict[str, Any] = {"__name__": "howto", "edges": drawing, "photo": drawing}
    with recorded() as calls:
        exec(code, names)
    assert calls, f"nothing was approximated in {title!r}"
    assert is_patched(names["pipe"]) == ("remove_patch" not in code)


def test_every_pipeline_that_was_promised_has_its_section() -> None:
    said = " ".join(title for title, _ in SECTIONS)
    kinds = ["1.5", "SDXL", "Flux", "3.5", "Qwen", "Wan", "ControlNet", "Image to image", "LoRA"]
    assert [word for word in [*kinds, "Compile", "Offload", "GPUs", "threads"] if word not in said] == []


@pytest.mark.parametrize("path", sorted(ROOT.glob("notebooks/*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_know_the_toy_s_words_and_hold_no_error_no_warning_and_no_place(path: Path) -> None:
    """The quickstart shows its pictures; after a change: `make quickstart`."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    code = "".join("".join(cell["source"]) for cell in cells)
    assert not [prompt for prompt in re.findall(r'"(an? [^"]+ background)"', code) if unknown_words(prompt)]
    for output in outputs:
        assert output["output_type"] != "error" and output.get("name") != "stderr"
        text = json.dumps([output.get("text"), output.get("data", {}).get("text/plain")])
        assert not re.search(r"warning|(^|[\s'\"(=])(~|file:/)?/\w", text, re.IGNORECASE), text
    if path.stem == "1-quickstart":
        assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
        encoded = [data["image/jpeg"] for data in (each.get("data", {}) for each in outputs) if "image/jpeg" in data]
        pictures = [Image.open(io.BytesIO(base64.b64decode(data))) for data in encoded]
        assert [picture.width // 256 for picture in pictures] == [1, 2, 6, 2]
        assert not any(fault_of(np.asarray(picture.convert("RGB"), dtype=float)) for picture in pictures)
        assert path.stat().st_size < 400_000
