"""PyTorch's defaults of dtype and device, which scripts set once at their top, change nothing that a patch computes."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_pipelines as tiny
from support import tiny_transformers
from support.checks import ACTIVE

import elfatt_sd
from elfatt_sd import PatchConfig, Phase
from elfatt_sd.attention import ordering
from elfatt_sd.families import family_of
from elfatt_sd.methods import Grid

CONFIGS = [
    *map(PatchConfig.preset, ACTIVE),
    PatchConfig("sampled", (Phase(1.0, "sampled", keys=16, residual_steps=2),)),
    PatchConfig("cells", (Phase(1.0, "cell_spread", cell=5, block_size=16),)),  # they do not divide the tokens
    PatchConfig("curve", (Phase(1.0, "block", block_size=16, block_order="curve", second_order="spread"),)),
]
JOINT = [
    config for config in CONFIGS if all(phase.attention.joint and not phase.merge.ratio for phase in config.all_phases)
]
FACTORIES = {
    *("arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm"),
    *("tensor", "tril_indices", "triu_indices", "zeros"),
}
WHOLE = {"arange", "as_tensor", "randint", "randperm", "tril_indices", "triu_indices"}  # of whole numbers, or as given

CASES = [*(("unet", config) for config in CONFIGS), *(("flux", config) for config in JOINT)]


@pytest.mark.parametrize(("family", "config"), CASES, ids=[f"{family}-{config.method}" for family, config in CASES])
def test_the_same_is_drawn_with_every_default(family: str, config: PatchConfig) -> None:
    """In two steps, which share differences. As a default device, the meta device stands for a GPU."""
    model: Any = tiny.unet() if family == "unet" else tiny_transformers.flux_transformer()
    grid, schedule = Grid.image(16, 12), torch.arange(999, -1, -1)
    if family == "flux":
        grid, schedule = Grid.image(6, 4), torch.arange(1000, 0, -1) / 1000
    given = family_of(model).arguments(model, grid, 2, torch.rand)

    @torch.no_grad()
    def run() -> torch.Tensor:
        timesteps = schedule[950:952, None].unbind()
        return torch.cat([model(**{**given, "timestep": each, "return_dict": False})[0] for each in timesteps])

    def patched() -> torch.Tensor:
        for kept in (ordering._static, ordering.lattice_order):
            kept.cache_clear()  # was made with other defaults
        with elfatt_sd.patched(model, config):
            return run()

    untouched, expected = run(), patched()
    assert not torch.equal(expected, untouched)
    try:
        for dtype in (torch.float64, torch.bfloat16, torch.float16):
            torch.set_default_dtype(dtype)
            assert torch.equal(patched(), expected)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        assert torch.equal(patched(), expected)


def test_whatever_is_made_says_its_dtype_and_device() -> None:
    """Also where no test sets a default: numbers of measurements, of statistics and of figures."""
    silent = []
    for path in sorted(Path(elfatt_sd.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES:
                given = {keyword.arg for keyword in node.keywords}
                wanted = {"device"} if node.func.attr in WHOLE else {"device", "dtype"}
                if getattr(node.func.value, "id", "") == "torch" and not wanted <= given:
                    silent.append(f"{path.name}:{node.lineno} {ast.unparse(node)}")
    assert not silent
