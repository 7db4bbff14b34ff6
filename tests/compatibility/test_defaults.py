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
from support.checks import generator

import elfatt_sd
from elfatt_sd import PatchConfig, Phase
from elfatt_sd.attention import ordering
from elfatt_sd.config import METHODS
from elfatt_sd.toy import renderer
from elfatt_sd.toy.features import load_feature_extractor

DTYPES = [torch.float64, torch.bfloat16, torch.float16]
CONFIGS = [
    *(PatchConfig.preset(method) for method in METHODS if method != "sd"),
    PatchConfig("sampled", (Phase(1.0, "sampled", keys=16, residual_steps=2),)),
    PatchConfig("cells", (Phase(1.0, "cell_spread", cell=5, block_size=16),)),  # they do not divide the tokens
    PatchConfig("curve", (Phase(1.0, "block", block_size=16, block_order="curve", second_order="spread"),)),
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


def forget() -> None:
    """Let nothing be kept that was made with other defaults."""
    for kept in (ordering._static, ordering.lattice_order):
        kept.cache_clear()


def call(model: Any) -> Callable[[], torch.Tensor]:
    """A function that calls a model twice, in steps that share differences, with what was made before."""
    if hasattr(model, "mid_block"):
        given = {"sample": torch.randn(2, 4, 16, 12, generator=generator())}
        given["encoder_hidden_states"] = torch.randn(2, 7, tiny.TEXT_WIDTH, generator=generator())
    else:
        ids = torch.zeros(24, 3)
        ids[:, 1], ids[:, 2] = torch.arange(6).repeat_interleave(4), torch.arange(4).repeat(6)
        config = model.config
        text = torch.randn(1, 7, config.joint_attention_dim, generator=generator())
        pooled = torch.randn(1, config.pooled_projection_dim, generator=generator())
        given = {"hidden_states": torch.randn(1, 24, 16, generator=generator()), "encoder_hidden_states": text}
        given |= {"pooled_projections": pooled, "img_ids": ids, "txt_ids": torch.zeros(7, 3)}
    steps = torch.arange(999, -1, -1)
    timesteps = steps if hasattr(model, "mid_block") else (steps + 1) / 1000

    def run() -> torch.Tensor:
        with torch.no_grad():
            made = [model(**given, timestep=each, return_dict=False)[0] for each in timesteps[950:952, None].unbind()]
        return torch.cat(made)

    return run


def skip_if_refused(model: Any, config: PatchConfig) -> None:
    joint = not hasattr(model, "mid_block")
    if joint and any(phase.merge.ratio or not phase.attention.joint for phase in config.all_phases):
        pytest.skip("not for layers that join image and text")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.method)
@pytest.mark.parametrize("make", [tiny.unet, tiny_transformers.flux_transformer], ids=["unet", "flux"])
def test_the_same_is_drawn_with_every_default_dtype(make: Any, config: PatchConfig, dtype: torch.dtype) -> None:
    model = make()
    skip_if_refused(model, config)
    run = call(model)
    untouched = run()
    with elfatt_sd.patched(model, config):
        expected = run()
    assert not torch.equal(expected, untouched)
    forget()
    torch.set_default_dtype(dtype)
    assert torch.equal(run(), untouched)
    with elfatt_sd.patched(model, config):
        assert torch.equal(run(), expected)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.method)
@pytest.mark.parametrize("make", [tiny.unet, tiny_transformers.flux_transformer], ids=["unet", "flux"])
def test_nothing_is_made_on_the_default_device(make: Any, config: PatchConfig) -> None:
    """The meta device stands for a GPU."""
    model = make()
    skip_if_refused(model, config)
    run = call(model)
    with elfatt_sd.patched(model, config):
        expected = run()
    forget()
    with torch.device("meta"), elfatt_sd.patched(model, config):
        assert torch.equal(run(), expected)


def test_scenes_are_the_same() -> None:
    expected = renderer.render(renderer.sample_scenes(3, 0), 16)
    for dtype in DTYPES:
        torch.set_default_dtype(dtype)
        torch.set_default_device("meta")
        assert torch.equal(renderer.render(renderer.sample_scenes(3, 0), 16), expected)


def test_networks_that_look_at_images_are_the_same() -> None:
    images = renderer.render(renderer.sample_scenes(2, 0), 64).mul(255).to(torch.uint8)
    expected = load_feature_extractor()(images)
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    assert torch.equal(load_feature_extractor()(images), expected)
    assert torch.get_default_dtype() == torch.bfloat16
    assert torch.get_default_device().type == "meta"


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
