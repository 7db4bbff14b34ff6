"""README, pages and notebooks: their Python runs, and the commands, settings, names and files that they name exist."""

from __future__ import annotations

import json
import pkgutil
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image
from support import tiny_pipelines as tiny
from support import tiny_transformers
from support.checks import like, recorded
from typer.testing import CliRunner

import elfatt_sd
from elfatt_sd import loading as pipelines
from elfatt_sd import methods, visualize
from elfatt_sd.cli import app
from elfatt_sd.config import METHODS
from elfatt_sd.patch import is_patched
from elfatt_sd.phases import setting_names
from elfatt_sd.toy.renderer import unknown_words
from tools import architecture
from tools.prose import PACKAGE, PAGES, ROOT

README, DOCS = (ROOT / "README.md").read_text(), ROOT / "docs"


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


def test_commands_exist_with_their_options() -> None:
    pages = [*ROOT.glob("*.md"), *DOCS.glob("*.md"), *ROOT.glob("*/*.md"), *ROOT.glob("*/results/README.md")]
    lines = {line for page in pages for line in page.read_text().replace("\\\n", " ").splitlines()}
    helps: dict[tuple[str, ...], str] = {}
    for line in sorted(line for line in lines if line.startswith("elfatt-sd ")):
        words = shlex.split(line.partition("#")[0].replace("...", ""))[1:]
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
    assert re.findall(r"^\| `([\w-]+)` \|", page.split("## Methods")[1].split("##")[0], re.MULTILINE) == list(METHODS)
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


@pytest.mark.parametrize("path", sorted(ROOT.glob("notebooks/*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_know_the_toy_s_words_and_hold_no_error_no_warning_and_no_place(path: Path) -> None:
    """They are committed as they ran, from top to bottom; after a change: `make notebook-outputs`."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    code = "".join("".join(cell["source"]) for cell in cells)
    assert not [prompt for prompt in re.findall(r'"(an? [^"]+ background)"', code) if unknown_words(prompt)]
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    texts = [json.dumps([output.get("text"), output.get("data", {}).get("text/plain")]) for output in outputs]
    assert not [text for text in texts if re.search(r"warning|(^|[\s'\"(=])(~|file:/)?/\w", text, re.IGNORECASE)]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert sum("image/jpeg" in output.get("data", {}) for output in outputs) == 4 or path.stem != "1-quickstart"
    assert path.stat().st_size < 500_000


def exists(name: str) -> bool:
    """Whether a dotted name is that of a module, or of something in one."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_what_pages_and_docstrings_name_is_there() -> None:
    """Modules and files; on the page of the architecture also classes, in the file that defines them."""
    missing = []
    for path in (path for pattern in (*PAGES, *PACKAGE) for path in ROOT.glob(pattern)):
        text = path.read_text(encoding="utf-8")
        dotted = set(re.findall(r"\belfatt_sd(?!\.json)(?:\.[A-Za-z_]\w*)+", text))
        missing += [f"{path}: {name}" for name in dotted if not exists(name)]
        files = set(re.findall(r"(?<![\w/.-])(?:elfatt_sd|docs|tests)/[\w/-]+\.(?:py|md|json|toml)\b", text))
        missing += [f"{path}: {name}" for name in files if not (ROOT / name).exists()]
    for file, name in re.findall(r"`([\w/]+\.py)`, `(\w+)[\w.]*`", (DOCS / "architecture.md").read_text()):
        text = (ROOT / "elfatt_sd" / file).read_text(encoding="utf-8")
        missing += [f"{file}: {name}"] * (not re.search(rf"^(?:class |def )?{name}\b", text, re.MULTILINE))
    assert missing == []
    said = "run python -m tools.architecture, look at the drawing, and commit it"
    assert architecture.FILE.read_text(encoding="utf-8") == architecture.draw(), said


def test_every_page_is_in_the_menu_and_every_public_name_on_the_page_of_the_api() -> None:
    menu, page = (ROOT / "mkdocs.yml").read_text(), (DOCS / "api.md").read_text()
    assert [path.name for path in DOCS.glob("*.md") if f" docs/{path.name}\n" not in menu] == []
    public = {*elfatt_sd.__all__, *visualize.__all__} - {"__version__"}
    assert public <= set(re.findall(r"^::: elfatt_sd\.\S+\.(\w+)$", page, re.MULTILINE))
