"""Differences that steps share: kept on the device, on the host or in 8 bits, and refused where they are too large."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from support import tiny_pipelines as tiny
from support import tiny_transformers
from support.checks import runner

import elfatt_sd
from elfatt_sd import ElfattError, PatchConfig, Phase
from elfatt_sd.phases import KEPT
from elfatt_sd.runtime.memory import GIB, Residual, check_memory, copies_of, kept_bytes

SHARED = PatchConfig("shared", (Phase(1.0, "sampled", keys=16, residual_steps=2),))


@pytest.fixture
def pipe(folder: Path) -> Iterator[Any]:
    yield tiny.sd15(folder)


@pytest.mark.parametrize("where", KEPT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_kept_comes_back(where: Any, dtype: torch.dtype) -> None:
    difference = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    difference[0, 0] = 0.0
    difference[0, 1] *= 100.0
    kept = Residual.keep(difference, where)
    back = kept.restore()
    assert (back.dtype, back.device) == (dtype, difference.device)
    if where == "fp8":
        assert kept.values.element_size() == 1
        largest = difference.abs().amax(-1, keepdim=True).float()
        assert ((back - difference).float().abs() <= largest / 16 + 1e-6).all()
    else:
        assert torch.equal(back, difference)


@pytest.mark.parametrize("where", KEPT)
def test_images_by_where_differences_are_kept(pipe: Any, where: Any) -> None:
    run = runner(pipe)
    untouched = run()
    with elfatt_sd.patched(pipe, SHARED):
        on_device = run()
    with elfatt_sd.patched(pipe, SHARED, residuals=where):
        found = run()
    assert torch.equal(found, on_device) == (where != "fp8")
    error, rounding = (on_device - untouched).norm(), (found - on_device).norm()
    assert rounding < error, "8 bits cost less than the approximation"


def test_too_much_is_refused_with_the_figure(pipe: Any) -> None:
    elfatt_sd.apply_patch(pipe, SHARED, residual_limit=1e-5)
    with pytest.raises(ElfattError, match=r"would keep [\d.]+ MiB on cpu, more than the 0\.0102 MiB.*residual_limit"):
        runner(pipe)()
    elfatt_sd.apply_patch(pipe, SHARED, residual_limit=1.0)
    runner(pipe)()


def test_the_limit_of_a_large_model() -> None:
    """Flux at 1024x1024 has 57 layers of 4096 tokens and 3072 channels; two rows in 16 bits."""
    needed = kept_bytes([(4096, 3072)] * 57, 2, torch.bfloat16, "device")
    assert round(needed / GIB, 2) == 2.67
    assert kept_bytes([(4096, 3072)] * 57, 2, torch.bfloat16, "fp8") < 0.51 * needed
    check_memory(needed, "device", 3.0, torch.device("cuda"))
    with pytest.raises(ElfattError, match=r"keep 2\.67 GiB on cuda, more than the 2\.00 GiB.*'host'.*'fp8'"):
        check_memory(needed, "device", 2.0, torch.device("cuda"))
    with pytest.raises(ElfattError, match="residual_steps=1, residuals='fp8', or a larger"):  # the host is the device
        check_memory(needed, "device", 2.0, torch.device("cpu"))


LATE = PatchConfig("late", (Phase(0.5), Phase(1.0, "sampled", keys=16, residual_steps=2)))


def test_a_phase_that_comes_later_is_refused_in_the_first_step(pipe: Any) -> None:
    elfatt_sd.apply_patch(pipe, LATE, residual_limit=1e-6)
    steps: list[int] = []
    pipe.unet.register_forward_hook(lambda *given: steps.append(1))
    with pytest.raises(ElfattError, match="residual_steps would keep"):
        runner(pipe, num_inference_steps=8)()
    assert not steps


@pytest.mark.parametrize(("guidance", "calls"), [(1.0, 1), (3.0, 2)])
@pytest.mark.parametrize("config", [SHARED, LATE], ids=lambda config: config.method)
def test_all_calls_of_a_step_count(config: PatchConfig, guidance: float, calls: int) -> None:
    """Wan calls its transformer once more for guidance; a limit is that of both."""
    if not hasattr(diffusers, "WanPipeline"):
        pytest.skip("this version of diffusers has no Wan")
    pipe, run = tiny_transformers.wan()
    one = kept_bytes([(72, 24)] * 2, 1, torch.float32, "device") / GIB
    elfatt_sd.apply_patch(pipe, config, residual_limit=(calls - 0.01) * one)
    with pytest.raises(ElfattError, match="residual_steps would keep"):
        run(num_inference_steps=8, guidance_scale=guidance)
    elfatt_sd.apply_patch(pipe, config, residual_limit=(calls + 0.01) * one)
    run(num_inference_steps=8, guidance_scale=guidance)


def test_a_second_transformer_counts_and_the_first_lets_go() -> None:
    if not hasattr(diffusers, "WanPipeline"):
        pytest.skip("this version of diffusers has no Wan")
    pipe, run = tiny_transformers.wan(second=True)
    elfatt_sd.apply_patch(pipe, SHARED, residuals="host")
    kept: list[bool] = []

    def see(*_: Any) -> None:
        run = pipe.transformer.elfatt_patch._schedule.run
        memory = run.kept[pipe.transformer.elfatt_patch._shared]
        kept.append(bool(memory.residuals))

    pipe.transformer_2.register_forward_hook(see)
    run(num_inference_steps=12)
    assert kept[0], "in the step of the change both are held"
    assert not any(kept[2:])
    one = kept_bytes([(72, 24)] * 2, 1, torch.float32, "device") / GIB
    elfatt_sd.apply_patch(pipe, SHARED, residual_limit=2.01 * one)
    with pytest.raises(ElfattError, match="residual_steps would keep"):
        run(num_inference_steps=12)


def test_a_plan_says_what_is_kept(pipe: Any) -> None:
    plan = elfatt_sd.plan(pipe, SHARED)
    sizes = [layer.tokens * layer.channels for layer in plan.layers if layer.patched]
    assert plan.kept_bytes == 2 * sum(sizes)
    assert "for each image of a batch in 16 bits, kept on the device" in str(plan)
    assert "steps share" not in str(elfatt_sd.plan(pipe, "elfatt-fast"))
    assert "in 8 bits" in str(elfatt_sd.plan(pipe, SHARED, residuals="fp8"))


GUIDED = PatchConfig("guided", (Phase(1.0, "sampled", keys=16, residual_steps=2, residual_guidance=True),))


def test_rows_of_the_same_latents_are_seen() -> None:
    latents = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    assert [copies_of(torch.cat([latents] * count)) for count in (1, 2, 3)] == [1, 2, 3]
    assert copies_of(torch.cat([latents, latents.flip(0)])) == 1
    assert copies_of(latents[:1]) == 1
    assert copies_of(latents[:1].expand(4, -1, -1, -1)) == 1, "one image that stands for several"


def test_guidance_shares_what_is_measured_with_the_prompt(pipe: Any) -> None:
    """In the step that measures, rows with the prompt are exact; those without are corrected by the same difference."""
    found: list[torch.Tensor] = []
    pipe.unet.register_forward_hook(lambda module, given, output: found.append(output[0]))
    run = runner(pipe)
    images = {}
    for name, config in {"untouched": PatchConfig("sd"), "shared": SHARED, "guided": GUIDED}.items():
        found.clear()
        with elfatt_sd.patched(pipe, config):
            images[name] = run()
        images[f"{name}, step 0"] = found[0]
    (without, given), (alike, exact) = images["guided, step 0"].chunk(2), images["untouched, step 0"].chunk(2)
    torch.testing.assert_close(given, exact, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(without, alike, atol=1e-4)
    torch.testing.assert_close(images["shared, step 0"], images["untouched, step 0"])
    errors = {name: float((images[name] - images["untouched"]).norm()) for name in ("shared", "guided")}
    assert 0 < errors["guided"] < 4 * errors["shared"], "nearly as close, for half of the exact attention"


@pytest.mark.parametrize("given", [{"guidance_scale": 1.0}, {"prompt": ["a", "b"], "guidance_scale": 1.0}])
def test_nothing_is_shared_where_latents_differ(pipe: Any, given: dict[str, Any]) -> None:
    found = []
    for config in (SHARED, GUIDED):
        with elfatt_sd.patched(pipe, config):
            found.append(runner(pipe, **given)())
    assert torch.equal(*found)


def test_nothing_is_shared_where_a_layer_splits_its_input(pipe: Any) -> None:
    """A part of the batch does not have the rows without the prompt first and those with it last."""
    for module in [module for name, module in pipe.unet.named_modules() if name.endswith(".attn1")]:
        whole = module.forward
        module.forward = lambda tokens, whole=whole, **given: torch.cat(
            [whole(part, **given) for part in tokens.chunk(len(tokens))]
        )
    test_nothing_is_shared_where_latents_differ(pipe, {})


def test_frames_are_rows(pipe: Any) -> None:
    """Every frame of a clip keeps a difference of its own; those with the prompt stand for those without."""
    parts = {name: part for name, part in pipe.components.items() if name != "safety_checker"}
    pipe = tiny.quiet(diffusers.AnimateDiffPipeline(**parts, motion_adapter=tiny.motion_adapter()))
    run = runner(pipe, num_frames=3)
    for config, rows in ((SHARED, 2 * 3), (GUIDED, 3)):
        layers = [layer for layer in elfatt_sd.plan(pipe, config).layers if layer.patched]
        of_one = sum(layer.tokens * layer.channels for layer in layers)
        needed = kept_bytes([(rows * of_one, 1)], 1, torch.float32, "device") / GIB
        elfatt_sd.apply_patch(pipe, config, residual_limit=1.001 * needed)
        run()
        elfatt_sd.apply_patch(pipe, config, residual_limit=0.999 * needed)
        with pytest.raises(ElfattError, match="residual_steps would keep"):
            run()


def test_guidance_in_two_calls_shares_a_difference() -> None:
    """Wan's second call of a step adds what the first one measured, and keeps nothing."""
    if not hasattr(diffusers, "WanPipeline"):
        pytest.skip("this version of diffusers has no Wan")
    pipe, run = tiny_transformers.wan()
    given = {"num_inference_steps": 4, "guidance_scale": 3.0}
    untouched = run(**given)
    one = kept_bytes([(72, 24)] * 2, 1, torch.float32, "device") / GIB
    with elfatt_sd.patched(pipe, GUIDED, residual_limit=1.01 * one):
        guided = run(**given)
    with elfatt_sd.patched(pipe, GUIDED, keys=72, groups=1):
        torch.testing.assert_close(run(**given), untouched, atol=1e-5, rtol=1e-4)
    with elfatt_sd.patched(pipe, SHARED):
        shared = run(**given)
    assert not torch.equal(guided, shared)
    assert float((guided - untouched).norm()) < 4 * float((shared - untouched).norm())


def test_latents_in_a_buffer_are_not_those_of_the_call_before(pipe: Any) -> None:
    """Two images in two calls of each step, handed over in the same memory or not."""
    latents = torch.randn(2, 1, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    text, buffer = torch.randn(1, 7, tiny.TEXT_WIDTH), torch.empty(1, 4, 16, 16)
    found: list[list[torch.Tensor]] = []
    for own in (True, False):
        with torch.no_grad(), elfatt_sd.patched(pipe.unet, GUIDED):
            calls = itertools.product(torch.arange(999, -1, -250), latents)
            given = ((each if own else buffer.copy_(each), timestep) for timestep, each in calls)
            found.append([pipe.unet(*each, text).sample for each in given])
    assert all(map(torch.equal, *found))


def test_a_configuration_keeps_it() -> None:
    assert PatchConfig.from_dict(GUIDED.to_dict()) == GUIDED
    assert "residual_guidance" not in str(SHARED.to_dict()), "files and hashes of earlier versions stay as they are"
    with pytest.raises(ElfattError, match="residual_guidance='yes' is not accepted"):
        Phase(1.0, "sampled", residual_steps=2, residual_guidance="yes")  # type: ignore[arg-type]
