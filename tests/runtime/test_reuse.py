"""What steps take over from earlier ones: the right value, in the right steps, without the work, and nothing left."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import diffusers
import pytest
import torch
from families.test_matrix import CASES, made
from support import checks, tiny_pipelines, tiny_transformers
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import elfatt_sd
from elfatt_sd import PatchConfig, Phase, StepReuse
from elfatt_sd.errors import ElfattError
from elfatt_sd.families import family_of, main_denoiser
from elfatt_sd.families.cuts import Cuts, Stand, Taking, Whole, extrapolated
from elfatt_sd.phases import reused_steps

UNKNOWN = torch.zeros(())
UNET = {"prompt_embeds": tiny_transformers.embeds(width=32), "height": 32, "width": 32, "output_type": "latent"}


def reusing(cut: str = "shallow-1", **changes: Any) -> PatchConfig:
    return PatchConfig("reusing", reuse=(StepReuse(cut=cut, **{"first": 2, "last": 1, **changes}),))


def unet_pipe(kind: str = "StableDiffusionPipeline", scheduler: Any = None, **parts: Any) -> Any:
    parts = {"unet": tiny_pipelines.unet(), "vae": tiny_pipelines.vae(), **parts}
    return tiny_transformers.pipeline(kind, **parts, scheduler=scheduler or tiny_pipelines.ddim())


def draw(pipe: Any, steps: int = 8, seeds: tuple[int, ...] = (0,), **given: Any) -> Tensor:
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    given = {**UNET, "guidance_scale": 1.0, **given, "prompt_embeds": UNET["prompt_embeds"].expand(len(seeds), -1, -1)}
    found: Tensor = pipe(num_inference_steps=steps, generator=generators, **given).images
    return found


@pytest.mark.parametrize("name", CASES)
def test_every_cut_of_every_family_gives_the_whole_from_what_it_kept(name: str) -> None:
    """With what the same call kept, the output is the same; then less is run, and the forwards are as they were."""
    module = main_denoiser(made(name)[0])
    family, forwards = family_of(module), {id(each): each.forward for each in module.modules()}
    grid = family.grid(module, elfatt_sd.methods.Grid(9 if CASES[name].size.get("frames") else 1, 8, 8))
    torch.manual_seed(0)
    given = family.arguments(module, grid, 2, lambda *sizes: torch.randn(sizes))
    now: list[Taking] = []
    for cut in [*family.cuts(module), "output"]:
        undo = [Stand(part, lambda: now[-1]).remove for part in family.cut(module, cut)]
        now.append(Taking())
        with FlopCounterMode(display=False) as work:
            whole = module(**given, return_dict=False)[0]
        now.append(Taking(now[-1].kept))
        with FlopCounterMode(display=False) as less:
            torch.testing.assert_close(module(**given, return_dict=False)[0], whole, atol=1e-5, rtol=1e-4)
        assert less.get_total_flops() < 0.9 * work.get_total_flops(), cut
        for each in reversed(undo):
            each()
        assert all(each.forward == forwards[id(each)] for each in module.modules()), cut


def test_steps_are_planned_before_the_run() -> None:
    def planned(steps: int, *reuse: StepReuse) -> str:
        return "".join("x" if each is None else str(each.order) for each in reused_steps(reuse, steps))

    assert planned(26, StepReuse(first=9, last=4)) == "xxxxxxxxx1x1x1x1x1x1x1xxxx"
    early, late = StepReuse(0.5, every=3, order=0, first=2, last=0), StepReuse(1.0, every=2, order=2, first=0, last=1)
    assert planned(12, early, late) == "xx00x0x2x2xx"
    assert planned(12, StepReuse(0.5, first=1, last=0)) == "xx1x1xxxxxxx"
    assert planned(6, StepReuse()) == "xxxxxx"
    assert planned(12, StepReuse(0.5, every=7, first=0, last=0)) == 12 * "x", "longer than the stretch"


def test_extrapolation_is_exact_for_polynomials() -> None:
    curves = {"a": lambda step: 3.0 + step, "b": lambda step: 1.0 - 2.0 * step + step**2}
    for order, name in ((1, "a"), (2, "b")):
        known = [(step, {name: torch.tensor([curves[name](step)])}) for step in (0, 2, 3, 7)]
        assert extrapolated(known, order, 9)[name].item() == pytest.approx(curves[name](9))
    assert torch.equal(extrapolated(known, 0, 9)["b"], known[-1][1]["b"])


@pytest.mark.parametrize("cut", ["shallow-1", "shallow-2", "output", "two"])
def test_a_run_computes_planned_steps_alone(cut: str) -> None:
    """Exact steps are bit for bit those of an untouched run as long as nothing was reused; others run less."""
    pipe = unet_pipe(unet=tiny_pipelines.unet(layers_per_block=2))
    untouched, calls = draw(pipe), list[bool]()
    outputs: list[Tensor] = []
    hooks = [
        pipe.unet.mid_block.resnets[0].register_forward_pre_hook(lambda *_: calls.append(True)),
        pipe.unet.register_forward_hook(lambda *call: outputs.append(call[2][0])),
    ]
    draw(pipe)
    two = StepReuse(0.5, "shallow-1", first=2, last=0), StepReuse(1.0, "shallow-2", first=0, last=1)
    exact, config = [*outputs], PatchConfig(cut, reuse=two) if cut == "two" else reusing(cut)
    with elfatt_sd.patched(pipe, config):
        outputs.clear(), calls.clear()
        once = draw(pipe)
        assert [torch.equal(*pair) for pair in zip(outputs, exact, strict=True)] == [True, True, *[False] * 6]
        ran = [*calls]
        assert torch.equal(draw(pipe), once)
        pair = draw(pipe, seeds=(0, 1))
        torch.testing.assert_close(pair[:1], once)
        assert not torch.equal(once, untouched)
    assert len(ran) == 8 - 3
    for hook in hooks:
        hook.remove()
    assert torch.equal(draw(pipe), untouched)


@pytest.mark.parametrize("name", ["Stable Diffusion 1.5", "Flux.1"])
@pytest.mark.parametrize("whole", [False, True])
def test_a_deep_copy_has_cuts_of_its_own(name: str, whole: bool) -> None:
    """Whichever of the two is put back, it is exact without a trace, and the other one still takes over."""
    pipe, run = made(name)
    cut = "output" if whole else family_of(main_denoiser(pipe)).cuts(main_denoiser(pipe))[0]

    def drawn(pipe: Any) -> Tensor:
        return tiny_transformers.runner(pipe, **run.given)(num_inference_steps=8)  # type: ignore[attr-defined]

    exact = drawn(pipe)
    elfatt_sd.apply_patch(pipe, reusing(cut))
    taken, other = drawn(pipe), copy.deepcopy(pipe)
    assert not torch.equal(taken, exact)
    for back, left in ((other, pipe), (pipe, copy.deepcopy(pipe))):
        elfatt_sd.remove_patch(back)
        assert torch.equal(drawn(back), exact) and torch.equal(drawn(left), taken)
        assert not any("forward" in vars(each) for each in main_denoiser(back).modules())


@pytest.mark.parametrize("scheduler", ["PNDMScheduler", "DPMSolverMultistepScheduler", "EulerDiscreteScheduler"])
def test_samplers_threads_and_interrupted_runs(scheduler: str) -> None:
    pipe = unet_pipe(scheduler=getattr(diffusers, scheduler).from_config(tiny_pipelines.ddim().config))
    with elfatt_sd.patched(pipe, reusing()):
        once, left = draw(pipe), [False, True, True, True, True]

        def stop(*_: Any) -> None:
            if not left.pop():
                raise KeyboardInterrupt

        hook = pipe.unet.conv_out.register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            draw(pipe)
        hook.remove()
        assert pipe.unet.elfatt_patch.call is None and torch.equal(draw(pipe), once)
        assert draw(pipe, height=48).shape != once.shape
        assert torch.equal(draw(pipe), once)


def test_with_attention_with_guidance_and_without() -> None:
    """Attention goes on in the layers that are run; guidance in two calls has two histories."""
    pipe = unet_pipe()
    both = PatchConfig("both", (Phase(1.0, "sampled", keys=8, residual_steps=2),), reuse=reusing().reuse)
    negative = {"negative_prompt_embeds": tiny_transformers.embeds(1, width=32), "guidance_scale": 3.0}
    with elfatt_sd.patched(pipe, both):
        once = draw(pipe, **negative)
        assert torch.equal(draw(pipe, **negative), once)
    with elfatt_sd.patched(pipe, both, reuse=()):
        assert not torch.equal(draw(pipe, **negative), once)


def test_calls_of_a_step_take_over_together() -> None:
    """Guidance in two calls: in the last step too. Where it was off for a while, it begins anew."""
    pipe, run = made("Qwen-Image")
    module, calls = main_denoiser(pipe), list[str]()
    with elfatt_sd.patched(pipe, reusing("output", first=3, last=0)):
        module.register_forward_pre_hook(lambda *_: calls.append("1"))
        module.transformer_blocks[0].register_forward_pre_hook(lambda *_: calls.append("x"))
        run(num_inference_steps=8)
    assert "".join(calls) == 3 * "1x1x" + 2 * "111x1x" + "11"
    cuts, known = Cuts(reusing("output").reuse, family_of(module), module), [(step, {"": UNKNOWN}) for step in (0, 1)]
    assert cuts.takings(2, 12, {"output": deque(known)})["output"].taken is not None
    for step in (8, 9):
        assert cuts.takings(step, 12, {"output": deque(known)})["output"].taken is None


def test_what_has_no_such_cut_has_its_output() -> None:
    """UNets whose last layers join none on the way down; ControlNets that have no residuals of a kind."""
    blocks = {"down_block_types": 2 * ("SkipDownBlock2D",), "up_block_types": 2 * ("SkipUpBlock2D",)}
    unet = diffusers.UNet2DModel(8, block_out_channels=(16, 32), norm_num_groups=8, **blocks)
    assert family_of(unet).cuts(unet) == []
    whole, call, output = Whole(unet), Taking(), ([UNKNOWN, UNKNOWN], None)
    whole.keep((), {}, output, call)
    assert whole.skip(lambda: None, (), {}, Taking(call.kept)) == output


@pytest.mark.parametrize("hooks_first", [True, False])
@pytest.mark.parametrize("package", ["accelerate", "diffusers"])
def test_hooks_that_bring_weights_still_run(package: str, hooks_first: bool) -> None:
    """Blocks of which a part is run get their weights as ever, whether the hooks or the patch came first."""
    hooks, pipe, brought = pytest.importorskip(f"{package}.hooks"), unet_pipe(), list[int]()
    with elfatt_sd.patched(pipe, reusing()):
        plain = draw(pipe)

    class Bring(hooks.ModelHook):  # type: ignore[name-defined, misc]
        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            brought.append(1)
            return args, kwargs

    if not hooks_first:
        elfatt_sd.apply_patch(pipe, reusing())
    if package == "accelerate":
        hooks.add_hook_to_module(pipe.unet.up_blocks[-1], Bring())
    else:
        hooks.HookRegistry.check_if_exists_or_initialize(pipe.unet.up_blocks[-1]).register_hook(Bring(), "bring")
    if hooks_first:
        elfatt_sd.apply_patch(pipe, reusing())
    assert torch.equal(draw(pipe), plain)
    assert len(brought) == 8
    elfatt_sd.remove_patch(pipe)
    untouched = draw(pipe)
    assert len(brought) == 16
    assert not torch.equal(untouched, plain)


@pytest.mark.parametrize(("kind", "end"), [("Img2Img", 1.0), ("ControlNet", 1.0), ("ControlNet", 0.5)])
def test_what_else_is_not_run(kind: str, end: float) -> None:
    """A run that begins late computes everything until there is enough to take over. A ControlNet is not called.

    What it gave is not taken over after its end, nor is a line drawn from steps with it to steps without.
    """
    net = unet = tiny_pipelines.unet()
    parts, given = dict[str, Any](), {**UNET, "guidance_scale": 1.0, "image": checks.picture()}
    if kind == "ControlNet":
        parts["controlnet"], given["control_guidance_end"] = (net := tiny_pipelines.controlnet(unet)), end
    else:
        given = {name: given[name] for name in given if name not in ("height", "width")} | {"strength": 0.5}
    pipe = unet_pipe(f"StableDiffusion{kind}Pipeline", unet=unet, **parts)
    run, ran = tiny_transformers.runner(pipe, **given, num_inference_steps=8 if parts else 16), list[str]()
    exact = run()
    for name, each in {"net": net, "unet": unet}.items():
        each.mid_block.resnets[0].register_forward_pre_hook(lambda *_, name=name: ran.append(name))
    with elfatt_sd.patched(pipe, reusing()):
        drawn = run()
    assert [ran.count(name) for name in ("net", "unet")] == [8 - (3 if end == 1 else 1), 8 - (3 if end == 1 else 2)]
    assert drawn.isfinite().all() and not torch.equal(drawn, exact)


def test_compiled_code_has_one_program_for_each_kind_of_step() -> None:
    pipe = unet_pipe()
    with elfatt_sd.patched(pipe, reusing()):
        eager = draw(pipe)
        programs = list[Any]()
        pipe.unet.compile(backend=lambda graph, _: (programs.append(graph), graph)[1], fullgraph=True)
        torch.testing.assert_close(draw(pipe), eager)
        assert len(programs) == 3, "that keeps, that takes over, and after which nothing takes over"
        draw(pipe, steps=9)
        assert len(programs) == 3
    torch._dynamo.reset()


def test_what_cannot_be_reused_is_exact_and_said_once() -> None:
    pipe = unet_pipe()
    untouched = draw(pipe, steps=3)
    with elfatt_sd.patched(pipe, reusing()), pytest.warns(UserWarning, match="approximates no step of this run"):
        assert torch.equal(draw(pipe, steps=3), untouched)
    both = PatchConfig("both", (Phase(1.0, "sampled", keys=8),), reuse=reusing().reuse)
    with elfatt_sd.patched(pipe, both), pytest.warns(UserWarning, match="no step of this run, .* takes over"):
        draw(pipe, steps=3)
    begun = unet_pipe("StableDiffusionImg2ImgPipeline")  # in a step that would take over, if two had been computed
    run = tiny_transformers.runner(begun, prompt_embeds=UNET["prompt_embeds"], image=checks.picture(), strength=0.25)
    with elfatt_sd.patched(begun, both), pytest.warns(UserWarning, match="no step of this run, .* takes over"):
        run(num_inference_steps=8, guidance_scale=1.0)
    assert "of 3 steps none can take over shallow-1" in str(elfatt_sd.plan(pipe, both, height=32, width=32, steps=3))
    with pytest.raises(ElfattError, match=r"cut='blocks-1-0' is not .* has shallow-1, output"):
        elfatt_sd.apply_patch(pipe, reusing("blocks-1-0"))
    assert not elfatt_sd.is_patched(pipe)
    assert both.with_settings(reuse=[*both.reuse]) == both
    for changes in ({"every": 1}, {"order": 3}, {"until": 1.5}, {"first": -1}):
        with pytest.raises(ElfattError, match=f"{next(iter(changes))}="):
            StepReuse(**changes)


def test_it_is_saved_planned_and_limited() -> None:
    """The plan counts what one call keeps, and runs, with a cut; the run refuses to keep more than it may."""
    plain = [{"cut": "shallow-1", "first": 2, "last": 1}]
    config = PatchConfig("both", (Phase(1.0, "sampled", keys=8),)).with_settings(reuse=plain)  # of the command line
    assert config.reuse == reusing().reuse
    assert PatchConfig.from_dict(config.to_dict()) == config
    assert "reuse" not in PatchConfig("plain").to_dict()
    pipe = unet_pipe()
    planned = elfatt_sd.plan(pipe, config, height=32, width=32)
    kept = planned._taking_over(config.reuse[0])[1]
    assert "is the order), some take over shallow-1: ..1.1.1" in str(planned)
    assert planned.call.after < elfatt_sd.plan(pipe, config, height=32, width=32, reuse=()).call.after
    with elfatt_sd.patched(pipe, reusing(), residual_limit=2 * kept / 2**30):  # float32 here
        draw(pipe)
    elfatt_sd.apply_patch(pipe, reusing(), residual_limit=(2 * kept - 1) / 2**30)
    with pytest.raises(ElfattError, match="would keep"):
        draw(pipe)
