"""PyTorch's defaults of dtype and device, which scripts set once at their top, change nothing that a patch computes."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
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
from elfatt_sd.toy import renderer
from elfatt_sd.toy.features import load_feature_extractor

DTYPES = [torch.float64, torch.bfloat16, torch.float16]
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


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    """What a test sets is taken back."""
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


def unet() -> tuple[Any, Grid, torch.Tensor]:
    return tiny.unet(), Grid.image(16, 12), torch.arange(999, -1, -1)


def flux() -> tuple[Any, Grid, torch.Tensor]:
    return tiny_transformers.flux_transformer(), Grid.image(6, 4), torch.arange(1000, 0, -1) / 1000


CASES: list[tuple[Callable[[], Any], PatchConfig]] = [(unet, config) for config in CONFIGS]
CASES += [(flux, config) for config in JOINT]


@pytest.mark.parametrize(("make", "config"), CASES, ids=lambda each: getattr(each, "method", None) or each.__name__)
def test_the_same_is_drawn_with_every_default(make: Callable[[], Any], config: PatchConfig) -> None:
    """In two steps, which share differences. As a default device, the meta device stands for a GPU."""
    model, grid, steps = make()
    given = family_of(model).arguments(model, grid, 2, torch.rand)

    def run() -> torch.Tensor:
        with torch.no_grad():
            timesteps = steps[950:952, None].unbind()
            return torch.cat([model(**{**given, "timestep": each, "return_dict": False})[0] for each in timesteps])

    def patched() -> torch.Tensor:
        for kept in (ordering._static, ordering.lattice_order):
            kept.cache_clear()  # was made with other defaults
        with elfatt_sd.patched(model, config):
            return run()

    untouched, expected = run(), patched()
    assert not torch.equal(expected, untouched)
    for dtype in DTYPES:
        torch.set_default_dtype(dtype)
        assert torch.equal(run(), untouched)
        assert torch.equal(patched(), expected)
    torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        assert torch.equal(patched(), expected)


def test_scenes_and_networks_that_look_at_images_are_the_same() -> None:
    scenes = renderer.render(renderer.sample_scenes(3, 0), 16)
    images = renderer.render(renderer.sample_scenes(2, 0), 64).mul(255).to(torch.uint8)
    features = load_feature_extractor()(images)
    torch.set_default_device("meta")
    for dtype in DTYPES:
        torch.set_default_dtype(dtype)
        assert torch.equal(renderer.render(renderer.sample_scenes(3, 0), 16), scenes)
        assert torch.equal(load_feature_extractor()(images), features)
        assert (torch.get_default_dtype(), torch.get_default_device().type) == (dtype, "meta")


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
