"""`torch.compile` of a patched UNet: how often it compiles, and that it computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_pipelines as tiny
from support.checks import TWO_PHASES, generator, processors, runner, with_effect
from torch.fx.experimental.proxy_tensor import make_fx

import elfatt_sd
from elfatt_sd.config import PatchConfig, Phase
from elfatt_sd.errors import ElfattError

ONE_LEVEL: dict[str, Any] = {
    "sample_size": 8,
    "block_out_channels": (8,),
    "down_block_types": ("CrossAttnDownBlock2D",),
    "mid_block_type": None,
    "up_block_types": ("CrossAttnUpBlock2D",),
}
EXACT_FIRST = PatchConfig("exact first", (Phase(0.3), Phase(1.0, "block", block_size=16, block_order="spread")))
QUALITY = PatchConfig.preset("elfatt-quality", keys=16, attention_dtype="bfloat16")

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Graphs:
    """A backend that counts the graphs it is given and runs them as they are."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.count += 1
        return graph.forward


def wrap(unet: Any, **options: Any) -> Any:
    return torch.compile(unet, **options)


def in_place(unet: Any, **options: Any) -> Any:
    unet.compile(**options)
    return unet


def compiled_and_patched(
    config: PatchConfig, compile_unet: Any, patch_first: bool, **options: Any
) -> tuple[Any, Graphs]:
    """A UNet that is compiled and patched, in either order, and its graphs."""
    unet, graphs = tiny.unet(**ONE_LEVEL), Graphs()
    if patch_first:
        unet = elfatt_sd.apply_patch(unet, config)
    unet = compile_unet(unet, backend=graphs, **options)
    return unet if patch_first else elfatt_sd.apply_patch(unet, config), graphs


def denoise(unet: Any, steps: int) -> torch.Tensor:
    """Call a UNet once for every step of a schedule and return what it gave."""
    scheduler = tiny.ddim()
    scheduler.set_timesteps(steps)
    sample = torch.randn(2, 4, 8, 8, generator=generator())
    text = torch.randn(2, 3, tiny.TEXT_WIDTH, generator=generator())
    with torch.no_grad():
        return torch.stack([unet(sample, timestep, text, return_dict=False)[0] for timestep in scheduler.timesteps])


@pytest.mark.parametrize(
    ("config", "compile_unet", "patch_first"), [(TWO_PHASES, wrap, False), (EXACT_FIRST, in_place, True)]
)
def test_many_steps_compile_once_per_phase(config: PatchConfig, compile_unet: Any, patch_first: bool) -> None:
    """More steps than dynamo compiles a function for; graphs may break."""
    eager = denoise(elfatt_sd.apply_patch(tiny.unet(**ONE_LEVEL), config), steps=20)
    unet, graphs = compiled_and_patched(config, compile_unet, patch_first)
    compiled = denoise(unet, steps=20)
    assert graphs.count == 2
    assert torch.allclose(compiled, eager, atol=1e-5)
    assert torch.equal(denoise(unet, steps=20), compiled)
    assert graphs.count == 2


@pytest.mark.parametrize(
    ("method", "compile_unet", "patch_first"),
    [
        ("tome", wrap, True),
        ("agent", in_place, False),
        ("elfatt", wrap, False),
        ("elfatt-fast", in_place, True),
        ("elfatt-quality", wrap, False),
        ("elfatt-quality", in_place, True),
    ],
)
def test_every_method_is_one_graph_for_each_phase(method: Any, compile_unet: Any, patch_first: bool) -> None:
    """With `fullgraph=True`, as diffusers advises; three for a shared difference: measuring, adding, the last step."""
    config = PatchConfig.preset(method, **with_effect(method, block_size=16, agents=8))
    eager = denoise(elfatt_sd.apply_patch(tiny.unet(**ONE_LEVEL), config), steps=10)
    unet, graphs = compiled_and_patched(config, compile_unet, patch_first, fullgraph=True)
    for _ in range(2):
        assert torch.allclose(denoise(unet, steps=10), eager, atol=1e-5)
    assert graphs.count == sum(1 if phase.residual_steps == 1 else 3 for phase in config.phases)


def test_attention_in_another_dtype_is_compiled() -> None:
    config = PatchConfig("own", (Phase(0.5, attention_dtype="bfloat16"), *QUALITY.phases), levels=9)
    eager = denoise(elfatt_sd.apply_patch(tiny.unet(**ONE_LEVEL), config), steps=10)
    unet, graphs = compiled_and_patched(config, in_place, True, fullgraph=True)
    for _ in range(2):
        assert torch.allclose(denoise(unet, steps=10), eager, atol=1e-5)
    assert graphs.count == 1 + 3


def test_patched_and_put_back_inside_a_compiled_pipeline(folder: Path) -> None:
    pipe = tiny.sd15(folder, scheduler=tiny.ddim(), **ONE_LEVEL)
    run, before = runner(pipe), processors(pipe)
    untouched = run()
    graphs = Graphs()
    pipe.unet = torch.compile(pipe.unet, backend=graphs)
    assert torch.allclose(run(), untouched, atol=1e-5)
    elfatt_sd.apply_patch(pipe, TWO_PHASES)
    patched = run()
    assert not torch.allclose(patched, untouched, atol=1e-3)
    assert graphs.count == 3
    elfatt_sd.remove_patch(pipe)
    assert all(processors(pipe)[name] is before[name] for name in before)
    assert torch.allclose(run(), untouched, atol=1e-5)


def test_ahead_of_time_compilation_gives_the_same() -> None:
    """Functionalised, with its fake tensors: what `inductor` sees too."""
    eager = denoise(elfatt_sd.apply_patch(tiny.unet(**ONE_LEVEL), TWO_PHASES), steps=4)
    unet = torch.compile(elfatt_sd.apply_patch(tiny.unet(**ONE_LEVEL), TWO_PHASES), backend="aot_eager")
    assert torch.allclose(denoise(unet, steps=4), eager, atol=1e-5)


@pytest.mark.parametrize(("method", "levels"), [("tome", 2), ("elfatt-quality", 3)])
def test_repeated_blocks_in_one_graph_each(method: str, levels: int) -> None:
    """Blocks of one class share dynamo's limit of compilations; each level and each kind of step takes some."""
    scheduler = tiny.ddim()
    scheduler.set_timesteps(6)
    widths: dict[str, Any] = {
        "block_out_channels": (8, 16, 16),
        "down_block_types": ("CrossAttnDownBlock2D",) * 3,
        "up_block_types": ("CrossAttnUpBlock2D",) * 3,
    }
    sample, text = torch.randn(2, 4, 16, 16), torch.randn(2, 5, tiny.TEXT_WIDTH)
    outputs = []
    for compiled in (False, True):
        unet = tiny.unet(**widths)
        elfatt_sd.apply_patch(unet, method, levels=levels, **({} if method == "tome" else {"block_size": 16}))
        if compiled:
            for module in unet.modules():
                if type(module).__name__ == "BasicTransformerBlock":
                    module.compile(backend="eager", fullgraph=True)
        with torch.no_grad():
            outputs.append(torch.stack([unet(sample, timestep, text).sample for timestep in scheduler.timesteps]))
    assert torch.allclose(outputs[0], outputs[1], atol=1e-4)


def test_a_compiled_block_alone_is_exact_also_after_a_run() -> None:
    unet = tiny.unet(**ONE_LEVEL)
    sample, text = torch.randn(2, 4, 16, 16), torch.randn(2, 5, tiny.TEXT_WIDTH)
    block: Any = next(module for module in unet.modules() if type(module).__name__ == "BasicTransformerBlock")
    tokens = torch.randn(2, 256, block.attn1.to_q.in_features)
    with torch.no_grad():
        exact = block(tokens, encoder_hidden_states=text)
        elfatt_sd.apply_patch(unet, "tome")
        block.compile(backend="eager", fullgraph=True)
        unet(sample, 999, text)
        assert torch.equal(block(tokens, encoder_hidden_states=text), exact)


def test_a_function_around_the_model_in_one_graph_is_told_why() -> None:
    unet = elfatt_sd.apply_patch(tiny.unet(**ONE_LEVEL), "tome")
    call = torch.compile(lambda *given: unet(*given).sample, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"give torch.compile\(fullgraph=True\) the model itself"):
        call(torch.randn(1, 4, 8, 8), torch.tensor(999), torch.randn(1, 3, tiny.TEXT_WIDTH))


class Plain(torch.nn.Module):
    """A UNet that takes and gives tensors, as tracing wants it."""

    def __init__(self, unet: Any) -> None:
        super().__init__()
        self.unet = unet

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return self.unet(sample, timestep, text, return_dict=False)[0]  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["tome", "elfatt-quality"])
def test_a_trace_or_an_export_is_refused(method: str) -> None:
    """It would hold one phase and its random draws for ever."""
    unet = elfatt_sd.apply_patch(tiny.unet(**ONE_LEVEL), method)
    inputs = (torch.randn(1, 4, 8, 8), torch.tensor(999), torch.randn(1, 3, tiny.TEXT_WIDTH))
    with torch.no_grad():
        with pytest.raises(ElfattError, match="remove_patch"):
            torch.jit.trace(Plain(unet), inputs, check_trace=False)
        with pytest.raises(ElfattError, match="remove_patch"):
            torch.export.export(Plain(unet), inputs, strict=False)
        with pytest.raises(ElfattError, match="remove_patch"):
            make_fx(Plain(unet))(*inputs)
        elfatt_sd.remove_patch(unet)
        traced = torch.jit.trace(Plain(unet), inputs, check_trace=False)
        assert torch.allclose(traced(*inputs), Plain(unet)(*inputs), atol=1e-5)


class Alone(torch.nn.Module):
    """A block or a layer that is called outside of its model."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, tokens: torch.Tensor, text: torch.Tensor | None = None) -> torch.Tensor:
        return self.module(tokens, encoder_hidden_states=text)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", ["transformer_blocks.0", "transformer_blocks.0.attn1"])
def test_a_trace_or_an_export_of_a_block_alone_is_refused(path: str) -> None:
    """It would hold exact attention for ever; called as it is, a block alone is exact."""
    unet = tiny.unet(**ONE_LEVEL)
    block = Alone(unet.down_blocks[0].attentions[0].get_submodule(path))
    inputs = (torch.randn(1, 64, 8), torch.randn(1, 3, tiny.TEXT_WIDTH))[: 1 if path.endswith("attn1") else 2]
    with torch.no_grad():
        exact = block(*inputs)
        elfatt_sd.apply_patch(unet, "tome")
        assert torch.equal(block(*inputs), exact)
        with pytest.raises(ElfattError, match="remove_patch"):
            torch.jit.trace(block, inputs, check_trace=False)
        with pytest.raises(ElfattError, match="remove_patch"):
            torch.export.export(block, inputs, strict=False)
        with pytest.raises(Exception, match="remove_patch"):
            torch.export.export(block, inputs, strict=True)
        with pytest.raises(ElfattError, match="remove_patch"):
            make_fx(block)(*inputs)
        assert torch.equal(torch.compile(block, backend="eager", fullgraph=True)(*inputs), exact)


class Replays:
    """A backend like CUDA graphs: what a graph gave is lost as soon as one is called again, here to NaN."""

    def __init__(self) -> None:
        self.given: list[torch.Tensor] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        def replay(*given: Any) -> Any:
            inputs = [x.clone() if any(x is old for old in self.given) else x for x in given]
            for old in self.given:
                old.fill_(float("nan") if old.is_floating_point() else 0)
            made = [x.clone() if isinstance(x, torch.Tensor) else x for x in graph.forward(*inputs)]
            self.given = [x for x in made if isinstance(x, torch.Tensor)]
            return tuple(made)

        return replay


@pytest.mark.parametrize(
    ("settings", "patch_first"),
    [
        ({"residual_steps": 3}, True),
        ({"residual_steps": 3}, False),
        ({"reuse_steps": 2}, False),
        ({"reuse_layers": True}, True),
    ],
    ids=str,
)
def test_what_is_kept_outlives_a_replay(settings: dict[str, Any], patch_first: bool) -> None:
    """With `mode="reduce-overhead"`, the next replay overwrites what a step keeps for later ones."""
    eager = denoise(elfatt_sd.apply_patch(tiny.unet(**ONE_LEVEL), "tome", **settings), steps=6)
    unet = tiny.unet(**ONE_LEVEL)
    if patch_first:
        unet = torch.compile(elfatt_sd.apply_patch(unet, "tome", **settings), backend=Replays())
    else:
        unet = elfatt_sd.apply_patch(torch.compile(unet, backend=Replays()), "tome", **settings)
    scheduler = tiny.ddim()
    scheduler.set_timesteps(6)
    sample = torch.randn(2, 4, 8, 8, generator=generator())
    text = torch.randn(2, 3, tiny.TEXT_WIDTH, generator=generator())
    with torch.no_grad():
        for timestep, wanted in zip(scheduler.timesteps, eager, strict=True):
            made = unet(sample, timestep, text, return_dict=False)[0]
            torch.testing.assert_close(made, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("method", "settings"),
    [("tome", {"residuals": "fp8"}), ("sampled", {}), ("sampled", {"fp32_logits": True})],
    ids=str,
)
def test_a_difference_outlives_the_replay_of_the_next_block(method: str, settings: dict[str, Any]) -> None:
    """Blocks that are compiled one by one overwrite each other's outputs within a call; differences have own memory."""
    phase = (
        Phase(1.0, "sampled", keys=16, residual_steps=3) if method == "sampled" else Phase(ratio=0.5, residual_steps=3)
    )
    config = PatchConfig("own", (phase,)).with_settings(**settings)
    eager = denoise(elfatt_sd.apply_patch(tiny.unet(**ONE_LEVEL), config), steps=6)
    unet, replays = elfatt_sd.apply_patch(tiny.unet(**ONE_LEVEL), config), Replays()
    for module in unet.modules():
        if type(module).__name__ == "BasicTransformerBlock":
            module.compile(backend=replays, fullgraph=True)
    torch.testing.assert_close(denoise(unet, steps=6), eager, atol=1e-5, rtol=1e-4)
    memory = next(
        module for module in unet.modules() if hasattr(module, "elfatt_state")
    ).elfatt_state.patch.latest.memory
    assert len(memory.buffers) == 3
