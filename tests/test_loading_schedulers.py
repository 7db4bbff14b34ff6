"""Every scheduler of diffusers in place of a model's own: it denoises what that does, or is refused in one line."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch

from elfatt_sd.drawing.running import check_steps
from elfatt_sd.errors import ElfattError
from elfatt_sd.loading import load_pipeline, make_scheduler, scheduler_like

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
COMMON = {"DDIM", "DDPM", "PNDM", "EulerDiscrete", "EulerAncestralDiscrete", "HeunDiscrete", "KDPM2Discrete", "LCM"}
COMMON |= {
    "DPMSolverMultistep",
    "DPMSolverSinglestep",
    "UniPCMultistep",
    "DEISMultistep",
    "TCD",
    "KDPM2AncestralDiscrete",
}
OTHERS = {"IPNDM", "EDMEuler", "DDIMInverse", "FlowMatchEulerDiscrete", "KarrasVe", "RePaint", "UnCLIP", "VQDiffusion"}
OTHERS |= {"CMStochasticIterative", "DDPMWuerstchen", "CogVideoXDPM", "Amused", "ScoreSdeVe"}


def classes() -> list[Any]:
    found = [getattr(diffusers, name) for name in dir(diffusers) if name.endswith(("Scheduler", "SchedulerMixin"))]
    return [each for each in found if isinstance(each, type) and issubclass(each, diffusers.SchedulerMixin)]


def fitting(own: Any) -> set[str]:
    names = set()
    for kind in classes():
        try:
            names.add(type(scheduler_like(own, kind)).__name__)
        except ElfattError as error:
            assert "\n" not in str(error)
    return {name.removesuffix("Scheduler") for name in names}


def test_every_scheduler_draws_with_the_toy_or_is_refused() -> None:
    pipe: Any = load_pipeline("toy", device="cpu", dtype="float32")
    pipe.set_progress_bar_config(disable=True)
    own, drawn = pipe.scheduler, set()
    for kind in classes():
        try:
            pipe.scheduler = make_scheduler(kind.__name__, own)
            check_steps(pipe, 2)
        except ElfattError as error:
            assert f"scheduler='{kind.__name__}'" in str(error) and "; " in str(error) and "\n" not in str(error)
            continue
        generator = torch.Generator().manual_seed(0)
        image = pipe(["owl"], height=64, width=64, num_inference_steps=2, output_type="pt", generator=[generator])
        assert torch.isfinite(image.images).all() and image.images.std() > 0.01
        drawn.add(kind.__name__.removesuffix("Scheduler"))
    assert drawn >= COMMON and not drawn & OTHERS


def test_a_flow_is_denoised_by_schedulers_for_flows() -> None:
    for own in (
        diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),  # needs to know the image's size
    ):
        assert "FlowMatchEulerDiscrete" in fitting(own) and not fitting(own) & (
            COMMON | OTHERS - {"FlowMatchEulerDiscrete"}
        )
    wan = diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    assert {"FlowMatchEulerDiscrete", "UniPCMultistep", "DPMSolverMultistep"} <= fitting(wan)
    assert not fitting(wan) & {"DDIM", "EulerDiscrete", "CMStochasticIterative"}


def test_a_trial_leaves_no_trace() -> None:
    own = diffusers.DDPMScheduler(prediction_type="v_prediction", num_train_timesteps=7)
    state, timesteps = torch.get_rng_state(), own.timesteps.clone()
    made = scheduler_like(own, diffusers.EulerAncestralDiscreteScheduler, timestep_spacing="linspace")
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(own.timesteps, timesteps)
    assert made.step_index is None and made.config.prediction_type == "v_prediction"
    assert (made.config.timestep_spacing, made.config.num_train_timesteps) == ("linspace", 7)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (diffusers.SchedulerMixin, "fails with the model's settings .*from_config"),
        (diffusers.RePaintScheduler, "fails with the model's settings .*original_image"),
        (diffusers.EDMEulerScheduler, "its first timestep is 1.09551 where the model's is 901"),
        (diffusers.FlowMatchEulerDiscreteScheduler, "takes the model's epsilon for flow_prediction"),
        (diffusers.CMStochasticIterativeScheduler, "takes the model's epsilon for something else"),
    ],
)
def test_the_reason_is_told(kind: Any, reason: str) -> None:
    with pytest.raises(ElfattError, match=reason):
        scheduler_like(diffusers.DDIMScheduler(steps_offset=1), kind)
