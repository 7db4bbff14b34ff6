"""`torch.compile` of a patched UNet: how often it compiles, and that it computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import tiny_pipelines as tiny
from support.checks import TWO_PHASES, denoise, with_effect
from torch.fx.experimental.proxy_tensor import make_fx

import elfatt_sd
from elfatt_sd.config import PatchConfig, Phase
from elfatt_sd.errors import ElfattError

ONE_LEVEL, ONE_LAYER = tiny.ONE_LEVEL, tiny.ONE_LAYER
THREE_LEVELS: dict[str, Any] = {"block_out_channels": (8, 16, 16), "up_block_types": ("UpBlock2D",) * 3}
THREE_LEVELS |= {"down_block_types": ("CrossAttnDownBlock2D",) * 3}

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Replays:
    """Counts the graphs it is given, and runs them as CUDA graphs: what one gave is NaN once one is called again."""

    def __init__(self) -> None:
        self.count = 0
        self.given: list[torch.Tensor] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.count += 1

        def replay(*given: Any) -> Any:
            inputs = [x.clone() if any(x is old for old in self.given) else x for x in given]
            for old in self.given:
                old.fill_(float("nan") if old.is_floating_point() else 0)
            made = [x.clone() if isinstance(x, torch.Tensor) else x for x in graph.forward(*inputs)]
            self.given = [x for x in made if isinstance(x, torch.Tensor)]
            return tuple(made)

        return replay


def in_place(unet: Any, **options: Any) -> Any:
    unet.compile(**options)
    return unet


def inside(unet: Any, **options: Any) -> Any:
    """A wrapper with weights of its own, around a compiled one."""
    wrapper = torch.nn.Module()
    wrapper.inner, wrapper.scale = torch.compile(unet, **options), torch.nn.Linear(1, 1)
    wrapper.forward = lambda *args, **kwargs: wrapper.inner(*args, **kwargs)
    return wrapper


def preset(method: Any, **settings: Any) -> PatchConfig:
    return PatchConfig.preset(method, **settings, **with_effect(method, block_size=16, agents=8))


ROUNDED = preset("elfatt-quality", attention_dtype="bfloat16")
# How it is patched and compiled, whether it is patched first, and how many graphs that takes: one for each phase; three
# for a shared difference (measuring, adding, the last step), two for a shared matching.
CASES: dict[str, tuple[PatchConfig, Callable[..., Any], bool, int]] = {
    "tome": (preset("tome", reuse_layers=True), torch.compile, True, 1),
    "tome, shared": (preset("tome", reuse_steps=2), in_place, False, 2),
    "tome, differences": (preset("tome", residual_steps=3), torch.compile, True, 3),
    "elfatt": (preset("elfatt"), inside, False, 2),
    "elfatt-fast": (preset("elfatt-fast"), in_place, True, 2),
    "elfatt-quality": (preset("elfatt-quality"), torch.compile, False, 3),
    "rounded": (PatchConfig("own", (Phase(0.5, attention_dtype="bfloat16"), *ROUNDED.phases)), in_place, True, 4),
}


@pytest.mark.parametrize("case", CASES)
def test_every_phase_is_one_graph(case: str) -> None:
    """With `fullgraph=True`, as diffusers advises; what a step keeps for later ones outlives the replays."""
    config, compiled, patch_first, graphs = CASES[case]
    widths = ONE_LEVEL if case in ("tome", "elfatt", "elfatt-quality") else ONE_LAYER
    eager = denoise(elfatt_sd.apply_patch(tiny.unet(**widths), config), steps=10)
    unet, backend = tiny.unet(**widths), Replays()
    if patch_first:
        unet = compiled(elfatt_sd.apply_patch(unet, config), backend=backend, fullgraph=True)
    else:
        unet = elfatt_sd.apply_patch(compiled(unet, backend=backend, fullgraph=True), config)
    for _ in range(2):
        torch.testing.assert_close(denoise(unet, steps=10), eager, atol=1e-5, rtol=1e-4)
    assert backend.count == graphs


SAMPLED = Phase(1.0, "sampled", keys=16, residual_steps=3)


@pytest.mark.parametrize(
    ("config", "widths", "backend"),
    [
        (PatchConfig.preset("elfatt-quality", levels=3, block_size=16), THREE_LEVELS, "eager"),
        (PatchConfig("own", (Phase(ratio=0.5, residual_steps=3),), residuals="fp8"), ONE_LEVEL, Replays()),
        (PatchConfig("own", (SAMPLED,), fp32_logits=True), ONE_LEVEL, Replays()),
    ],
    ids=["three levels", "float8", "sampled"],
)
def test_repeated_blocks(config: PatchConfig, widths: dict[str, Any], backend: Any) -> None:
    """Blocks of a class share dynamo's limit and overwrite each other's outputs; differences have their own memory."""
    side = 8 if widths is ONE_LEVEL else 16
    eager = denoise(elfatt_sd.apply_patch(tiny.unet(**widths), config), 6, side)
    unet = elfatt_sd.apply_patch(tiny.unet(**widths), config)
    for module in unet.modules():
        if type(module).__name__ == "BasicTransformerBlock":
            module.compile(backend=backend, fullgraph=True)
    torch.testing.assert_close(denoise(unet, 6, side), eager, atol=1e-5, rtol=1e-4)


def test_ahead_of_time_compilation_gives_the_same() -> None:
    """Functionalised, with its fake tensors: what `inductor` sees too. At another size, the length is a symbol."""
    eager, unet = (elfatt_sd.apply_patch(tiny.unet(**ONE_LAYER), TWO_PHASES) for _ in range(2))
    compiled = torch.compile(unet, backend="aot_eager", fullgraph=True)
    for side in (8, 12):
        assert torch.allclose(denoise(compiled, 4, side), denoise(eager, 4, side), atol=1e-5)


def test_a_function_around_the_model_in_one_graph_is_told_why() -> None:
    unet = elfatt_sd.apply_patch(tiny.unet(**ONE_LEVEL), "tome")
    call = torch.compile(lambda *given: unet(*given).sample, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"give torch.compile\(fullgraph=True\) the model itself"):
        call(torch.randn(1, 4, 8, 8), torch.tensor(999), torch.randn(1, 3, tiny.TEXT_WIDTH))


class Alone(torch.nn.Module):
    """A UNet, or a block or a layer outside of it, that takes and gives tensors, as tracing wants it."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, first: torch.Tensor, *others: Any) -> torch.Tensor:
        if hasattr(self.module, "conv_in"):
            return self.module(first, *others, return_dict=False)[0]  # type: ignore[no-any-return]
        return self.module(first, encoder_hidden_states=others[0] if others else None)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", ["", "transformer_blocks.0", "transformer_blocks.0.attn1"])
def test_a_trace_or_an_export_is_refused(path: str) -> None:
    """It would hold one phase, or exact attention, for ever; called as it is, and compiled, a block alone is exact."""
    unet, text = tiny.unet(**ONE_LEVEL), torch.randn(1, 3, tiny.TEXT_WIDTH)
    alone = Alone(unet.down_blocks[0].attentions[0].get_submodule(path) if path else unet)
    whole: Any = (torch.randn(1, 4, 8, 8), torch.tensor(999), text)
    inputs: Any = (torch.randn(1, 64, 8), text)[: 1 if path.endswith("attn1") else 2] if path else whole
    with torch.no_grad():
        exact = alone(*inputs)
        elfatt_sd.apply_patch(unet, "tome" if path else "elfatt-quality")
        with pytest.raises(ElfattError, match="remove_patch"):
            torch.jit.trace(alone, inputs, check_trace=False)
        with pytest.raises(ElfattError, match="remove_patch"):
            torch.export.export(alone, inputs, strict=False)
        with pytest.raises(ElfattError, match="remove_patch"):
            make_fx(alone)(*inputs)
        if path:
            with pytest.raises(Exception, match="remove_patch"):
                torch.export.export(alone, inputs, strict=True)
            assert torch.equal(alone(*inputs), exact)
            compiled = torch.compile(alone, backend="eager", fullgraph=True)
            for _ in range(2):
                assert torch.equal(compiled(*inputs), exact)
                unet(*whole)  # also after a run
        elfatt_sd.remove_patch(unet)
        assert torch.allclose(torch.jit.trace(alone, inputs, check_trace=False)(*inputs), exact, atol=1e-5)
