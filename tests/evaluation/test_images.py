"""Images of a row: their latents, pixels and schedulers, and which prompts they are of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from support import runs

import elfatt_sd
from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation import generate
from elfatt_sd.evaluation.generate import image_progress
from elfatt_sd.evaluation.images import check_images, row_patch, start_noise, to_uint8
from elfatt_sd.evaluation.prompts import run_prompts, spread
from elfatt_sd.evaluation.protocols import Cell, Protocol
from elfatt_sd.evaluation.run import Run
from elfatt_sd.evaluation.stages import obstacles


def test_latents_do_not_depend_on_batches_or_rows(protocol: Protocol) -> None:
    pipe = generate.load_protocol_pipeline(protocol)
    together = start_noise(pipe, protocol, [3, 4, 5])["latents"]
    alone = torch.cat([start_noise(pipe, protocol, [seed])["latents"] for seed in (3, 4, 5)])
    assert torch.equal(together, alone)
    assert together.std() == pytest.approx(1, abs=0.1)


def test_half_precision_latents_are_rounded_float32_ones(protocol: Protocol) -> None:
    pipe = generate.load_protocol_pipeline(protocol)
    exact = start_noise(pipe, protocol, [3])["latents"]
    pipe.unet.to(torch.bfloat16)
    rounded = start_noise(pipe, protocol, [3])["latents"]
    assert torch.equal(rounded, exact.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_pixels_are_rounded_in_full_precision(dtype: torch.dtype) -> None:
    """As diffusers does; half precision has no 255 levels, and all that it rounds wrongly comes out darker."""
    images = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = VaeImageProcessor.numpy_to_pil(VaeImageProcessor.pt_to_numpy(images.float()))[0]
    assert np.array_equal(to_uint8(images)[0].numpy(), np.asarray(expected))


def test_the_untouched_pipeline_takes_another_backend(protocol: Protocol) -> None:
    pipe = generate.load_protocol_pipeline(protocol)
    cell = Cell("sd", "SD", "sd", role="baseline", settings={"attention_backend": "native"})
    with row_patch(pipe, cell):
        assert elfatt_sd.is_patched(pipe)
    with row_patch(pipe, protocol.baseline):
        assert "ElfattProcessor" not in {type(each).__name__ for each in pipe.unet.attn_processors.values()}


@pytest.mark.parametrize(("offsets", "wrong"), [((4,), 4), ((5, 9), 9), ((5, 5), 5), ((5, 10), None), ((5,), None)])
def test_null_rows_share_no_seed(tmp_path: Path, model: Path, offsets: tuple[int, ...], wrong: int | None) -> None:
    nulls = "".join(
        f'[[cells]]\nname = "null{index}"\nmethod = "sd"\nrole = "null"\nseed_offset = {offset}\n'
        for index, offset in enumerate(offsets)
    )
    protocol = runs.small_protocol(tmp_path, model, cells=f'[[cells]]\nmethod = "sd"\nrole = "baseline"\n{nulls}')
    if wrong is None:
        assert len(run_prompts(protocol)) == 5
        return
    with pytest.raises(ElfattError, match=f"seed_offset={wrong} is not accepted; with 5 images a row"):
        run_prompts(protocol)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0.0, "image 7 is black"),
        (0.5, "image 7 is of one colour"),
        (float("nan"), "not finite"),
        (float("inf"), "not finite"),
        (torch.tensor([0.2, 0.4, 0.6])[:, None, None].expand(3, 4, 4), "of one colour"),
    ],
)
def test_bad_images_are_told(value: Any, message: str) -> None:
    good = torch.linspace(0, 1, 48).reshape(1, 3, 4, 4)
    check_images(good, [6])
    with pytest.raises(ElfattError, match=message):
        check_images(torch.cat([good, torch.zeros(1, 3, 4, 4) + value]), [6, 7])


def test_the_peer_is_deterministic_and_leaves_no_trace(protocol: Protocol) -> None:
    pipe = generate.load_protocol_pipeline(protocol)
    cell = protocol.cell("tomesd-ratio0.5")
    state, kind = torch.get_rng_state(), type(pipe.unet.down_blocks[0].attentions[0].transformer_blocks[0])

    def image(seed: int) -> torch.Tensor:
        with row_patch(pipe, cell, seed), torch.no_grad():
            return generate.make_images(pipe, protocol, ["cat"], [3])

    first = image(1)
    torch.rand(3)
    assert torch.equal(first, image(1))
    assert not torch.equal(first, image(2))
    assert type(pipe.unet.down_blocks[0].attentions[0].transformer_blocks[0]) is kind
    torch.set_rng_state(state)
    image(1)
    assert torch.equal(torch.get_rng_state(), state)


def test_schedulers_by_name(tmp_path: Path, model: Path) -> None:
    protocol = runs.small_protocol(tmp_path, model, "scheduler=EulerAncestralDiscreteScheduler")
    pipe = generate.load_protocol_pipeline(protocol)
    assert type(pipe.scheduler).__name__ == "EulerAncestralDiscreteScheduler"
    together = generate.make_images(pipe, protocol, ["cat", "dog"], [3, 4])
    alone = generate.make_images(pipe, protocol, ["dog"], [4])
    assert torch.allclose(together[1], alone[0], atol=1e-4)  # its noise comes from each image's own generator
    plms = runs.small_protocol(tmp_path, model, "scheduler=PLMS")
    pipe.scheduler.register_to_config(skip_prk_steps=False)  # as of a model that is not stored with PLMS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("elfatt_sd.loading.load_pipeline", lambda *_, **__: pipe)
        generate.load_protocol_pipeline(plms)
    pipe.scheduler.set_timesteps(4)
    assert type(pipe.scheduler).__name__ == "PNDMScheduler"
    assert len(pipe.scheduler.timesteps) == 5  # PLMS visits its second step twice; Runge and Kutta would need more
    wrong = runs.small_protocol(tmp_path, model, "scheduler=Eulerish")
    with pytest.raises(ElfattError, match="'Eulerish' is not known"):
        generate.load_protocol_pipeline(wrong)


@pytest.mark.parametrize(
    "name", ["SchedulerMixin", "RePaintScheduler", "FlowMatchEulerDiscreteScheduler", "IPNDMScheduler"]
)
def test_a_dry_run_tells_that_a_scheduler_does_not_fit(tmp_path: Path, model: Path, name: str) -> None:
    protocol = runs.small_protocol(tmp_path, model, f"scheduler={name}")
    (told,) = [line for line in obstacles(Run(tmp_path / "run", protocol)) if "scheduler" in line]
    assert told.startswith(f"scheduler='{name}' does not fit the model's PNDMScheduler: ")
    assert told.endswith("; accepted: stored, PLMS, or a scheduler class of diffusers for such a model.")


def test_spread_is_even_and_not_in_step_with_the_list() -> None:
    values = list(range(1792))
    chosen = spread(values, 256)
    assert chosen == spread(values, 256)
    assert [value // 7 for value in chosen] == list(range(256))
    assert len({value % 7 for value in chosen}) == 7
    assert spread(values, 0) == spread(values, 5000) == values


def test_a_log_tells_the_time_left_however_long_a_batch_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("elfatt_sd.progress.time.monotonic", lambda: clock[0])
    with image_progress(100, shown=True) as advance:
        advance(0, "sd")
        for _ in range(4):
            clock[0] += 45  # seconds for 10 images
            advance(10, "sd")
        advance(0, "tome")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "generate: sd, 0 of 100 images done"
    assert lines[-1] == "generate: tome, 40 of 100 images done, about 0:04:30 left"
    assert len(lines) == 4  # one for each row, and of the batches not more than one a minute
    with image_progress(50, shares=2, shown=True) as advance:
        advance(0, "sd")
    assert capsys.readouterr().err == "generate: sd, 0 of 50 images of process 1 of 2 done\n"
