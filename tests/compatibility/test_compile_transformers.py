"""`torch.compile` of a patched transformer, as a whole and block by block, without a break in the graph."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from support import tiny_transformers
from support.checks import Run, generator

import elfatt_sd
from elfatt_sd import PatchConfig, Phase

PHASES = {
    "first half": (Phase(0.5, "cell_spread", block_size=16),),
    "shared difference": (Phase(1.0, "cell_spread", block_size=16, cell=8, residual_steps=2),),
    "elfatt": (Phase(1.0, "elfatt", block_size=16, agents=8, block_order="windows"),),
    "sampled": (Phase(1.0, "sampled", keys=16),),
    "rounded": (
        Phase(0.5, attention_dtype="bfloat16"),
        Phase(1.0, "cell_spread", block_size=16, cell=8, residual_steps=2, attention_dtype="bfloat16"),
    ),
}

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def flux(folder: Path) -> tuple[Any, Run]:
    pipe = tiny_transformers.flux(folder, transformer=tiny_transformers.flux_transformer(num_layers=2))

    def run(**options: Any) -> torch.Tensor:
        given = {"height": 32, "width": 48, "max_sequence_length": 16, **options}
        made: torch.Tensor = pipe("a b", generator=generator(), output_type="latent", **given).images
        return made

    return pipe, run


@pytest.mark.parametrize(
    ("family", "name", "order"),
    [
        ("flux", "sampled", "patch, compile"),
        ("flux", "first half", "compile, patch"),
        ("flux", "shared difference", "patch, blocks"),
        ("flux", "elfatt", "blocks, patch"),
        ("flux", "rounded", "patch, compile"),
        ("qwen_image", "sampled", "compile, patch"),
        ("qwen_image", "elfatt", "patch, blocks"),
        ("wan", "sampled", "patch, compile"),
        ("wan", "first half", "blocks, patch"),
    ],
)
def test_compiled_is_eager(folder: Path, family: str, name: str, order: str) -> None:
    if not hasattr(diffusers, {"qwen_image": "QwenImagePipeline", "wan": "WanPipeline"}.get(family, "FluxPipeline")):
        pytest.skip("this version of diffusers does not have it")
    pipe, run = flux(folder) if family == "flux" else getattr(tiny_transformers, family)()
    run = functools.partial(run, num_inference_steps=4)
    transformer, config = pipe.transformer, PatchConfig("own", PHASES[name])
    with elfatt_sd.patched(pipe, config):
        eager = run()
    untouched = run()
    assert not torch.equal(eager, untouched)

    def compile_now() -> None:
        if "blocks" not in order:
            pipe.transformer = torch.compile(transformer, backend="eager", fullgraph=True)
        elif hasattr(transformer, "compile_repeated_blocks"):
            transformer.compile_repeated_blocks(backend="eager", fullgraph=True)
        else:
            pytest.skip("this version of diffusers compiles no repeated blocks")

    if order.startswith("patch"):
        elfatt_sd.apply_patch(pipe, config)
        compile_now()
    else:
        compile_now()
        elfatt_sd.apply_patch(pipe, config)
    for _ in range(2):
        torch.testing.assert_close(run(), eager, atol=1e-5, rtol=1e-4)
    elfatt_sd.remove_patch(pipe)
    torch.testing.assert_close(run(), untouched, atol=1e-5, rtol=1e-4)
