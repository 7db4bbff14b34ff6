"""Flux.1: a small random pipeline through its own `__call__`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from support import checks, tiny_transformers
from support.checks import generator, recorded

import elfatt_sd
from elfatt_sd import ElfattError, PatchConfig, Phase
from elfatt_sd.families import family_of
from elfatt_sd.methods import Grid
from elfatt_sd.patch import current_config

runner = functools.partial(tiny_transformers.runner, prompt="a b", height=32, width=48, max_sequence_length=16)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_transformers.flux(tmp_path_factory.mktemp("flux"))


@pytest.fixture
def flux(made: Any) -> Iterator[Any]:
    yield made
    elfatt_sd.remove_patch(made)


def test_true_guidance_is_two_calls_of_a_step(flux: Any) -> None:
    run = runner(flux, negative_prompt="b", true_cfg_scale=2.0)
    checks.check_all_keys(flux, run)
    checks.check_steps(flux, run, layers=2, calls=2, counts=(4,))


@pytest.mark.parametrize("method", ["agent", "elfatt", "elfatt-fast", "elfatt-quality"])
def test_presets(flux: Any, method: Any) -> None:
    run = runner(flux, num_inference_steps=5)
    untouched = run()
    elfatt_sd.apply_patch(flux, method)
    config = current_config(flux)
    assert config is not None
    assert not any(phase.matches for phase in config.phases)
    with recorded() as calls:
        assert not torch.equal(run(), untouched)
    assert calls
    settings: Any = {"seed": 3} if method == "agent" else {"seed": 3, "block_size": 24}  # without effect on agents
    if method in ("agent", "elfatt"):
        settings["block_order"] = "spread"  # which is drawn
    elfatt_sd.apply_patch(flux, method, **settings)
    changed = current_config(flux)
    assert changed is not None
    assert (changed.seed, changed.method) == (3, method)
    assert changed == config.with_settings(**settings)


def test_what_does_not_go_with_rotary_positions_or_text(flux: Any) -> None:
    with pytest.raises(ElfattError, match=r"'tome' merges tokens.* rotary positions"):
        elfatt_sd.apply_patch(flux, "tome")
    with pytest.raises(ElfattError, match="merges tokens"):
        elfatt_sd.apply_patch(flux, PatchConfig("own", (Phase(1.0, "agent", agent_source="merged"),)))
    with pytest.raises(ElfattError, match=r"attention_backend='flash' is not accepted for FluxTransformer2DModel"):
        elfatt_sd.apply_patch(flux, "elfatt", attention_backend="flash")
    assert not elfatt_sd.is_patched(flux)


def test_ids_that_are_no_grid_leave_the_call_exact(flux: Any) -> None:
    transformer = flux.transformer
    arguments = family_of(transformer).arguments(transformer, Grid.image(4, 6), 1, torch.rand)
    arguments["img_ids"] = arguments["img_ids"][torch.randperm(24, generator=generator())]
    with torch.no_grad():
        untouched = transformer(**arguments).sample
        elfatt_sd.apply_patch(transformer, PatchConfig("few", (Phase(1.0, "cell_spread", block_size=4),)))
        with pytest.warns(UserWarning, match="not a grid"):
            assert torch.equal(transformer(**arguments).sample, untouched)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_that_differ_by_query_leave_the_call_exact(flux: Any, dtype: torch.dtype) -> None:
    """As those of regional prompts do."""
    transformer = flux.transformer
    arguments = family_of(transformer).arguments(transformer, Grid.image(4, 6), 1, torch.rand)
    tokens = arguments["encoder_hidden_states"].shape[1] + 24
    mask = (torch.rand(1, 1, tokens, tokens, generator=generator()) > 0.3).to(dtype)
    arguments["joint_attention_kwargs"] = {"attention_mask": mask}
    with torch.no_grad():
        untouched = transformer(**arguments).sample
        elfatt_sd.apply_patch(transformer, PatchConfig("few", (Phase(1.0, "cell_spread", block_size=4),)))
        with pytest.warns(UserWarning, match="a mask that is not of keys alone"):
            assert torch.equal(transformer(**arguments).sample, untouched)


FEW = PatchConfig("few", (Phase(1.0, "cell_spread", cell=4, block_size=4),))


class OnDevice(torch.Tensor):
    """Position ids that seem to be on a device: how often they are read is counted."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    device = torch.device("cuda")  # type: ignore[assignment]
    read: ClassVar[list[int]] = []

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        OnDevice.read += [1] * (args[0] == "cpu")
        return super().to(*args, **kwargs)


def ids_of(rows: int, columns: int) -> torch.Tensor:
    ids = torch.zeros(rows * columns, 3)
    ids[:, 1], ids[:, 2] = torch.arange(rows).repeat_interleave(columns), torch.arange(columns).repeat(rows)
    return ids


def call(net: Any, ids: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
    given = {"hidden_states": torch.randn(1, 24, 16, generator=generator()), "txt_ids": torch.zeros(7, 3)}
    given |= {"encoder_hidden_states": torch.randn(1, 7, net.config.joint_attention_dim, generator=generator())}
    given |= {"pooled_projections": torch.zeros(1, net.config.pooled_projection_dim)}
    output: torch.Tensor = net(**given, img_ids=ids, timestep=timestep.expand(1), return_dict=False)[0]
    return output


@pytest.mark.parametrize("kind", [torch.Tensor, OnDevice])
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("write", ["copy", "data"])
def test_ids_that_are_written_in_place_are_read_again(kind: Any, inference: bool, write: str) -> None:
    net, shapes = tiny_transformers.flux_transformer(), ((6, 4), (4, 6), (8, 3))
    with torch.inference_mode(inference), torch.no_grad(), elfatt_sd.patched(net, FEW):
        steps = torch.linspace(1, 0.25, 4)
        fresh = [call(net, ids_of(*shape), step) for shape, step in zip(shapes, steps, strict=False)]
        ids = ids_of(*shapes[0]).as_subclass(kind)
        for shape, step, expected in zip(shapes, steps, fresh, strict=False):
            if write == "copy":
                ids.copy_(ids_of(*shape))
            else:
                ids.data = ids_of(*shape)
            assert torch.equal(call(net, ids, step), expected)


def test_ids_that_numpy_writes_are_read_again() -> None:
    net, ids = tiny_transformers.flux_transformer(), ids_of(6, 4)
    with torch.no_grad(), elfatt_sd.patched(net, FEW):
        step = torch.tensor([0.5])
        expected = call(net, ids_of(4, 6), step)
        call(net, ids, step)
        ids.numpy()[:] = ids_of(4, 6).numpy()
        assert torch.equal(call(net, ids, step), expected)


def test_ids_on_a_device_are_read_once_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CUDA graph writes is not counted: between two runs, they may be others."""
    net, ids = tiny_transformers.flux_transformer(), ids_of(6, 4).as_subclass(OnDevice)
    monkeypatch.setattr(OnDevice, "read", [])
    with torch.no_grad(), elfatt_sd.patched(net, FEW):
        for run in range(1, 3):
            for step in torch.linspace(1, 0.25, 4):
                call(net, ids, step)
            assert len(OnDevice.read) == run
