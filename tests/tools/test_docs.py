"""README, pages and notebooks: their Python runs, what they name exists, links lead somewhere, words are plain."""

from __future__ import annotations

import base64
import io
import json
import pkgutil
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from support import tiny_pipelines as tiny
from support import tiny_transformers
from support.checks import like, recorded
from typer.testing import CliRunner

import elfatt_sd
from elfatt_sd import loading as pipelines
from elfatt_sd import methods, visualize
from elfatt_sd.cli import app
from elfatt_sd.config import METHODS, setting_names
from elfatt_sd.drawing.pictures import fault_of
from elfatt_sd.evaluation.report.charts import drawing
from elfatt_sd.patch import is_patched
from elfatt_sd.toy.renderer import unknown_words
from tools import architecture, prose, size
from tools.drawings import draw_phases, main
from tools.prose import PACKAGE, ROOT
from tools.site import SHIM, on_post_page, page_files

README, DOCS = (ROOT / "README.md").read_text(), ROOT / "docs"
RESULTS = [ROOT / folder / "results/README.md" for folder in ("eval", "benchmarks")]
WRITTEN = [*ROOT.glob("*.md"), *DOCS.glob("*.md"), *ROOT.glob("eval/*.md"), *ROOT.glob("tools/*.md"), *RESULTS]


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
    for page in WRITTEN:
        links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
        assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == [], page


def test_commands_exist_with_their_options() -> None:
    lines = {line.partition("#")[0].strip() for page in WRITTEN for line in page.read_text().splitlines()}
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


# Pages, drawings and prose say what is there, in plain words; sizes are counted.

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
FILES = [path for pattern in (*prose.PAGES, *PACKAGE) for path in ROOT.glob(pattern)]


def named(menu: object) -> set[str]:
    """The pages of a menu, at any depth."""
    if isinstance(menu, str):
        return {menu}
    parts = menu.values() if isinstance(menu, dict) else menu
    return set().union(*map(named, parts))  # type: ignore[arg-type]


def test_the_menu_and_the_api_page_name_everything_for_readers() -> None:
    pages = {path.as_posix() for path in page_files(ROOT)}
    menu = named(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert {page for page in pages if page.startswith("docs/") and page.endswith(".md")} <= menu <= pages
    page = (ROOT / "docs" / "api.md").read_text()
    for module in (elfatt_sd, visualize):
        for name in set(module.__all__) - {"__version__"}:
            assert re.search(rf"^::: elfatt_sd\.\S+\.{name}$", page, re.MULTILINE), name


def test_nothing_is_loaded_from_elsewhere() -> None:
    page = SimpleNamespace(url="docs/start.html")
    own = on_post_page(f'<script src="{SHIM}"></script><a href="https://example.org">link</a>', page, None)
    assert '<script src="worker.js">' in own
    for foreign in ('<img src="https://example.org/x.png">', "<script src=//cdn.example.org/x.js>"):
        with pytest.raises(ValueError, match=r"docs/start.html loads from elsewhere"):
            on_post_page(foreign, page, None)


def exists(name: str) -> bool:
    """Whether a dotted name is that of a module, or of something in one."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_the_architecture_is_drawn_and_what_its_page_points_to_is_there() -> None:
    said = "run python -m tools.architecture, look at the drawing, and commit it"
    assert architecture.FILE.read_text(encoding="utf-8") == architecture.draw(), said
    names = [name for layer in architecture.layers() for name in layer]
    assert names[0] == "cli" and names[-1] == "errors" and len(names) == len(set(names))
    assert all(architecture.line_of_module(name) for name in names)
    with pytest.raises(ValueError, match="no class Gone in elfatt_sd/runtime"):
        architecture.class_of("Gone")
    for file, name in re.findall(r"`([\w/]+\.py)`, `([\w.]+)`", PAGE):
        assert exists(f"elfatt_sd.{file.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}.{name}"), name
        text, first = (ROOT / "elfatt_sd" / file).read_text(encoding="utf-8"), name.partition(".")[0]
        assert re.search(rf"^(?:class |def )?{first}\b", text, re.MULTILINE), f"{name} is imported from elsewhere"
    assert len(PAGE.splitlines()) <= 80 and len(PAGE.split()) <= 1200, "it is read in five minutes"


def test_modules_and_files_that_are_named_exist() -> None:
    missing = []
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        dotted = set(re.findall(r"\belfatt_sd(?:\.[A-Za-z_]\w*)+", text))
        missing += [f"{path}: {name}" for name in dotted if not exists(name)]
        files = set(re.findall(r"(?<![\w/.-])(?:elfatt_sd|docs|tests)/[\w/-]+\.(?:py|md|json|toml)\b", text))
        missing += [f"{path}: {name}" for name in files if not (ROOT / name).exists()]
    assert missing == []


def test_drawings_say_what_the_presets_are(tmp_path: Path) -> None:
    with drawing():
        axes = draw_phases().axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [name for name in METHODS if name != "sd"]
    assert axes.texts[-1].get_text() == "sampled keys, 1 step of 4 exact"
    main([str(tmp_path)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["layer.png", "phases.png"]


TEXT = """# A picture

Two `pictures` are here. See [them](pictures.md).

```
a picture
```

- One picture
  is beside another one. It is so.

| picture | `picture` |
"""
MODULE = '''picture = {"picture": 1}


def f(picture):
    """Draw it.

    As a picture of `picture`.

    Args:
        picture: the very one.
    """
    return f"no picture {picture}"
'''
CELLS = [("code", "picture"), ("markdown", "# A picture\n\nIt is a picture.")]
NOTEBOOK = json.dumps({"cells": [{"cell_type": kind, "source": [text]} for kind, text in CELLS]})
BETTER = "'picture'; better: image"
BESIDE = "10: 'beside'; better: compared with, or: with"
NO = "It is no image. There is no image. It is no longer one. They are no more than two.\n"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("page.md", TEXT, [f"1: {BETTER}", f"9: {BETTER}", BESIDE, f"12: {BETTER}"]),
        ("module.py", MODULE, [f"7: {BETTER}", "10: 'the very'; better: the same", f"12: {BETTER}"]),
        ("a.ipynb", NOTEBOOK, [f"1: {BETTER}", f"3: {BETTER}"]),
        ("a.html.j2", '<a id="picture">{{ picture(1) }}{% if\npicture %}</a>\nA picture\n', [f"3: {BETTER}"]),
        ("page.md", NO, ["1: 'is no '; better: is not a"]),
        ("page.md", "word " * 50, ["1: a sentence of 50 words", " 50.0 words a sentence, on average"]),
    ],
)
def test_words_of_the_list_are_named_with_better_ones(
    name: str, text: str, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code and links hold no words; titles and tables no sentences."""
    monkeypatch.setattr(prose, "_proselint", lambda text: iter(()))
    (tmp_path / name).write_text(text)
    found = [line.removeprefix(f"{tmp_path / name}:") for line in prose.check(tmp_path / name)]
    assert [line[: len(start)] for line, start in zip(found, said, strict=True)] == said
    assert prose.sentences(prose.prose_of(TEXT)) == [(3, 4), (9, 6), (10, 3)]


def test_pages_and_package_are_plain(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("proselint")
    assert prose.main([]) == 0, capsys.readouterr().err


SOURCE = '''"""A module.

Of two functions.
"""

# why
def long(x):
    """Say so."""
    if x:
        raise ValueError(x)

    return x


class Kind:
    async def short(self):
        """Nothing."""
'''
FOUND = {"package_lines": 17, "package_files": 2, "test_lines": 1, "test_files": 1, "root_modules": 2, "functions": 2}
FOUND |= {"short_functions_percent": 50.0, "docstrings_percent": 35.3, "longest_file": 17}  # 6 of 17
FOUND["raises_in_1000_lines_of_code"] = 166.7  # 1 of 6


def test_sizes_are_counted_and_what_passes_its_ceiling_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"elfatt_sd/__init__.py": "", "elfatt_sd/a.py": SOURCE, "tests/test_a.py": "x = 1\n", "tools/e.py": "1\n"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for passed in ("", *FOUND):
        ceilings = [f"{name} = {value - 0.1 * (name == passed)}" for name, value in FOUND.items()]
        (tmp_path / "pyproject.toml").write_text("\n".join(["[tool.elfatt.size]", *ceilings]))
        code = size.main(["--check"], tmp_path)
        said = f"error: {passed} is {FOUND[passed]}, more than " if passed else ""
        assert code == bool(passed) and capsys.readouterr().err.startswith(said)
