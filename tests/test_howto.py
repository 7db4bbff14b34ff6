"""Every section of the how-to runs as it is printed, on a small random pipeline of its kind."""

from __future__ import annotations

import re
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

from elfatt_sd.patch import is_patched

PAGE = (Path(__file__).parents[1] / "docs/howto.md").read_text()
SECTIONS = re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
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
    for word in (
        "1.5",
        "SDXL",
        "Flux",
        "3.5",
        "Qwen",
        "Wan",
        "ControlNet",
        "Image to image",
        "LoRA",
        "Compile",
        "Offload",
    ):
        assert word in said
    assert "GPUs" in said and "threads" in said
