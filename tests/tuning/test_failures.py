"""What goes wrong while a pipeline is tuned: one clear line, a pipeline as it was, and nothing lost that is known."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support import checks, commands
from support import tiny_pipelines as tiny

import elfatt_sd
from elfatt_sd import methods
from elfatt_sd.errors import ElfattError, ElfattFailure
from elfatt_sd.families import find_layers
from elfatt_sd.patch import current_config
from elfatt_sd.tuning import tune
from elfatt_sd.tuning.probe import Probe
from elfatt_sd.tuning.runs import Runs
from elfatt_sd.tuning.search import Proving, Search

NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB."),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4294967296 bytes."),
]
LARGER = 100  # tokens, than those of the grids that an attention is tried on when it is registered


@dataclass(frozen=True)
class Failing(methods.CellSpread):
    """An approximation that is good where it is tried, and fails in the layers of a model."""

    name: ClassVar[str] = "failing"
    error: ClassVar[Exception | None] = None
    until: ClassVar[int] = 0  # calls that do not fail
    calls: ClassVar[int] = 0

    def attend(self, layer: Any, tokens: torch.Tensor, prepared: Any) -> torch.Tensor:
        mixed = super().attend(layer, tokens, prepared)
        if tokens.shape[1] <= LARGER:
            return mixed
        Failing.calls += 1
        if Failing.calls <= self.until:
            return mixed
        if self.error is not None:
            raise self.error
        return mixed * math.nan


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "_known", dict(methods._known))
    monkeypatch.setattr(Failing, "calls", 0)
    elfatt_sd.register(Failing)


@pytest.fixture
def asked(asked: dict[str, Any]) -> dict[str, Any]:
    """What the smallest tuning is asked for."""
    return asked | {"steps": 4, "height": 32, "width": 32, "images": 3}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The configurations that images were drawn with."""
    found: list[Any] = []
    shot = Runs._shot

    def counted(runs: Runs, sample: Any, config: Any = None, *others: Any) -> Any:
        found.append(config)
        return shot(runs, sample, config, *others)

    monkeypatch.setattr(Runs, "_shot", counted)
    return found


@contextlib.contextmanager
def out_of_memory(pipe: Any, method: str | None, error: Exception) -> Iterator[None]:
    """Let memory run out where an image that was drawn with a method is decoded."""

    def fail(*_: Any) -> None:
        config = current_config(pipe)
        if (None if config is None else config.method) == method:
            raise error

    handle = pipe.vae.decoder.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("home", "name"),
    [
        (Search, "measure_untouched"),
        (Probe, "_after_layer"),
        (Probe, "_after_call"),
        (Search, "_alone"),
        (Search, "settle"),
        (Proving, "_proof"),
    ],
)
def test_where_it_is_stopped_the_pipeline_is_as_it_was(
    pipe: Any, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, home: Any, name: str
) -> None:
    elfatt_sd.apply_patch(pipe, "tome", ratio=0.3)
    run = checks.runner(pipe)
    before, forward = run(), pipe.unet.forward

    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(home, name, stopped)
    with pytest.raises(KeyboardInterrupt):
        tune(pipe, closeness=20, **asked)
    assert pipe.unet.forward == forward
    assert torch.equal(run(), before)
    elfatt_sd.remove_patch(pipe)
    assert not pipe.unet._forward_hooks and not pipe.unet._forward_pre_hooks


@pytest.mark.usefixtures("own_cache", "failing")
@pytest.mark.parametrize(("error", "until"), [*zip(NO_MEMORY, (0, 2), strict=True), (None, 0)], ids=repr)
def test_an_approximation_that_fails_is_left_out(
    pipe: Any,
    asked: dict[str, Any],
    error: Exception | None,
    until: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Failing, "error", error)
    monkeypatch.setattr(Failing, "until", until)
    tuned = tune(pipe, closeness=20, **asked)
    assert Failing.calls > until
    assert tuned.config.active
    finest = {layer.name for layer in find_layers(pipe.unet) if layer.downsample == 1}
    chosen = {own.layers for own in tuned.config.per_layer for phase in own.phases if phase.attention.name == "failing"}
    assert finest and not finest & chosen


@pytest.mark.parametrize(
    ("method", "error"), [(None, NO_MEMORY[0]), ("probe", NO_MEMORY[1]), ("tuned", MemoryError())], ids=repr
)
@pytest.mark.usefixtures("own_cache")
def test_an_image_that_has_no_memory_is_told_in_one_line(
    pipe: Any, asked: dict[str, Any], method: str | None, error: Exception
) -> None:
    with (
        out_of_memory(pipe, method, error),
        pytest.raises(ElfattFailure, match="memory ran out while an image") as told,
    ):
        tune(pipe, closeness=20, **asked)
    assert "\n" not in str(told.value)
    assert not elfatt_sd.is_patched(pipe)


def test_a_preset_that_has_no_memory_is_left_out_of_the_curve(pipe: Any, asked: dict[str, Any]) -> None:
    presets = {**asked, "presets": True}
    left_out = "elfatt-quality is left out of the curve: memory ran out"
    with out_of_memory(pipe, "elfatt-quality", NO_MEMORY[0]), pytest.warns(UserWarning, match=left_out):
        tuned = tune(pipe, closeness=20, **presets)
    assert {"elfatt", "elfatt-fast"} <= {point.name for point in tuned.points}
    assert "elfatt-quality" not in {point.name for point in tuned.points}


def raises(first: Any, second: Any) -> float:
    raise LookupError("no such\nimage")


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        (raises, r"metric 'raises' cannot compare two images \(LookupError: no such image\)"),
        (lambda first, second: math.nan, "gives nan for two images"),
        (lambda first, second: None, "cannot compare two images"),
        (lambda first: 1.0, "cannot compare two images"),
    ],
)
@pytest.mark.usefixtures("own_cache")
def test_a_metric_that_fails_is_told_with_the_first_image(
    pipe: Any, asked: dict[str, Any], drawn: list[Any], metric: Any, says: str
) -> None:
    with pytest.raises(ElfattError, match=says) as told:
        tune(pipe, closeness=30, metric=metric, **asked)
    assert "\n" not in str(told.value)
    assert drawn == [None]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"closeness": 1.01, "metric": "ssim"}, "closeness=1.01 is not accepted; metric='ssim' gives 1 at most"),
        ({"closeness": -0.1, "metric": "lpips"}, "closeness=-0.1 is not accepted; metric='lpips' gives 0 at least"),
        ({"closeness": -1, "metric": "dists"}, "closeness=-1 is not accepted; metric='dists' gives 0 at least"),
        ({"closeness": -5, "metric": "ssim"}, "closeness=-5 is not accepted; metric='ssim' gives -1 at least"),
        ({"closeness": -1}, "metric='psnr' gives 0 at least .in dB; 8-bit images that are not identical end near"),
        ({"closeness": 500}, "closeness=500 is not accepted; metric='psnr' gives 100 at most"),
    ],
)
def test_closer_than_equal_is_refused(pipe: Any, asked: dict[str, Any], given: dict[str, Any], says: str) -> None:
    with pytest.raises(ElfattError, match=says):
        tune(pipe, **asked, **given)


@pytest.mark.parametrize(("value", "says"), [(0.0, "is of one colour"), (math.nan, "is not finite")])
@pytest.mark.usefixtures("own_cache")
def test_what_is_no_image_is_not_compared(
    folder: Path, asked: dict[str, Any], drawn: list[Any], value: float, says: str
) -> None:
    broken = commands.break_decoder(tiny.sd15(folder), value)
    with pytest.raises(ElfattError, match=f"the image of 'a cat', seed 0, {says}"):
        tune(broken, closeness=30, **asked)
    assert drawn == [None]


def test_prompts_that_are_cut_off_are_said_to_be(pipe: Any, asked: dict[str, Any]) -> None:
    prompts = ["a " * 90 + "c", "a " * 90 + "d"]
    with pytest.warns(UserWarning, match="2 of 2 prompts are cut off: the text encoder takes 75 tokens"):
        tune(pipe, closeness=20, **asked | {"prompts": prompts})


def test_what_cannot_be_tuned_is_said(pipe: Any) -> None:
    with pytest.raises(ElfattError, match="UNet2DConditionModel cannot be tuned; give a pipeline"):
        tune(pipe.unet, closeness=30)


@pytest.mark.parametrize("given", [{"closeness": 100}, {"closeness": 1, "metric": "ssim"}])
def test_closer_than_any_choice_leaves_the_pipeline_alone(
    pipe: Any, asked: dict[str, Any], given: dict[str, Any]
) -> None:
    tuned = tune(pipe, **asked, **given)
    assert tuned.proof is None
    assert str(tuned).startswith("untouched: no choice that is as close as asked")


def test_a_cache_that_cannot_be_written_is_told_once(
    pipe: Any, asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("ELFATT_SD_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="what tuning measures is not kept for the next run") as told:
        tuned = tune(pipe, closeness=20, **asked)
    assert len(told) == 1
    assert tuned.proof is not None


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("change", ["input", "decoder"])
def test_what_is_kept_of_another_model_is_forgotten(
    pipe: Any, asked: dict[str, Any], drawn: list[Any], change: str
) -> None:
    """Inputs and the weights around the denoiser are not in the name of the folder, and change every image."""
    tune(pipe, closeness=20, **asked)
    first, _ = len(drawn), drawn.clear()
    weight, kept = pipe.vae.decoder.conv_out.weight, pipe.vae.decoder.conv_out.weight.detach().clone()
    given = {"inputs": {"guidance_rescale": 0.7}} if change == "input" else {}
    with torch.no_grad():
        weight.mul_(0.5 if change == "decoder" else 1)
    try:
        tune(pipe, closeness=20, **asked, **given)
    finally:
        with torch.no_grad():
            weight.copy_(kept)
    assert len(drawn) >= first
