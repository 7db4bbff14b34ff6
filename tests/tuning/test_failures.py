"""What goes wrong while a pipeline is tuned: one clear line, a pipeline as it was, nothing lost; and its runs."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from support import checks, commands
from support import tiny_pipelines as tiny

import elfatt_sd
from elfatt_sd import methods, tuning
from elfatt_sd.config import PatchConfig
from elfatt_sd.errors import ElfattError, ElfattFailure
from elfatt_sd.families import find_layers
from elfatt_sd.phases import Phase
from elfatt_sd.tuning import tune
from elfatt_sd.tuning.probe import LayerFigures, Probe
from elfatt_sd.tuning.runs import Runs, Sample, Settings, Store
from elfatt_sd.tuning.search import Proving, Search, read_figures

NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB."),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4294967296 bytes."),
]
LARGER = 100  # tokens, than those of the grids that an attention is tried on when it is registered
LATE = PatchConfig("late", (Phase(0.5), Phase(1.0, "sampled", keys=16)))
SAMPLE = Sample("a red star", 3)


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


@contextlib.contextmanager
def out_of_memory(pipe: Any, method: str | None, error: Exception) -> Iterator[None]:
    """Let memory run out where an image that was drawn with a method is decoded."""

    def fail(*_: Any) -> None:
        patch = vars(pipe.unet).get("elfatt_patch")
        if (None if patch is None else patch.config.method) == method:
            raise error

    handle = pipe.vae.decoder.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("home", "name"), [(Probe, "_after_layer"), (Probe, "_after_call"), (Search, "_alone"), (Proving, "_proof")]
)
def test_where_it_is_stopped_the_pipeline_is_as_it_was(
    pipe: Any, least: dict[str, Any], monkeypatch: pytest.MonkeyPatch, home: Any, name: str
) -> None:
    elfatt_sd.apply_patch(pipe, "tome", ratio=0.3)
    run = checks.runner(pipe)
    before = run()

    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(home, name, stopped)
    with pytest.raises(KeyboardInterrupt):
        tune(pipe, closeness=20, **least)
    assert torch.equal(run(), before)
    elfatt_sd.remove_patch(pipe)
    assert "forward" not in vars(pipe.unet)
    assert not pipe.unet._forward_hooks and not pipe.unet._forward_pre_hooks


@pytest.mark.usefixtures("own_cache", "failing")
@pytest.mark.parametrize(("error", "until"), [(NO_MEMORY[1], 2), (None, 0)], ids=repr)
def test_an_approximation_that_fails_is_left_out(
    pipe: Any,
    least: dict[str, Any],
    error: Exception | None,
    until: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Failing, "error", error)
    monkeypatch.setattr(Failing, "until", until)
    tuned = tune(pipe, closeness=20, **least)
    assert Failing.calls > until
    assert tuned.config.active
    finest = {layer.name for layer in find_layers(pipe.unet) if layer.downsample == 1}
    chosen = {own.layers for own in tuned.config.per_layer for phase in own.phases if phase.attention.name == "failing"}
    assert finest and not finest & chosen


@pytest.mark.parametrize(("method", "error"), [(None, NO_MEMORY[0]), ("tuned", MemoryError())], ids=repr)
@pytest.mark.usefixtures("own_cache")
def test_an_image_that_has_no_memory_is_told_in_one_line(
    pipe: Any, least: dict[str, Any], method: str | None, error: Exception
) -> None:
    with (
        out_of_memory(pipe, method, error),
        pytest.raises(ElfattFailure, match="memory ran out while an image") as told,
    ):
        tune(pipe, closeness=20, **least)
    assert "\n" not in str(told.value)
    assert not elfatt_sd.is_patched(pipe)


def raises(first: Any, second: Any) -> float:
    raise LookupError("no such\nimage")


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        (raises, r"metric 'raises' cannot compare two images \(LookupError: no such image\)"),
        (lambda first, second: math.nan, "gives nan for two images"),
    ],
)
@pytest.mark.usefixtures("own_cache")
def test_a_metric_that_fails_is_told_with_the_first_image(
    pipe: Any, least: dict[str, Any], drawn: list[Any], metric: Any, says: str
) -> None:
    with pytest.raises(ElfattError, match=says) as told:
        tune(pipe, closeness=30, metric=metric, **least)
    assert "\n" not in str(told.value)
    assert drawn == [None]


@pytest.mark.parametrize(("value", "says"), [(0.0, "is of one colour"), (math.nan, "is not finite")])
@pytest.mark.usefixtures("own_cache")
def test_what_is_no_image_is_not_compared(
    folder: Path, least: dict[str, Any], drawn: list[Any], value: float, says: str
) -> None:
    broken = commands.break_decoder(tiny.sd15(folder), value)
    with pytest.raises(ElfattError, match=f"the image of 'a cat', seed 0, {says}"):
        tune(broken, closeness=30, **least)
    assert drawn == [None]


def test_a_cache_that_cannot_be_written_is_told_once(
    pipe: Any, least: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("ELFATT_SD_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="what tuning measures is not kept for the next run") as told:
        tuned = tune(pipe, closeness=20, **least)
    assert len(told) == 1
    assert tuned.proof is not None


@pytest.mark.usefixtures("own_cache")
def test_what_is_kept_of_another_model_is_forgotten(
    pipe: Any, least: dict[str, Any], drawn: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs and the weights around the denoiser are not in the name of the folder, and change every image."""

    def images(**given: Any) -> int:
        drawn.clear()
        with pytest.raises(KeyboardInterrupt):
            tune(pipe, closeness=20, **least | {"images": 8}, **given)
        return len(drawn)

    def stopped(_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Search, "measure_layers", stopped)
    weight = pipe.vae.decoder.conv_out.weight
    kept = weight.detach().clone()
    first = images()
    assert images() < first
    assert images(inputs={"guidance_rescale": 0.7}) >= first
    with torch.no_grad():
        weight.mul_(0.5)
    try:
        assert images() >= first
    finally:
        with torch.no_grad():
            weight.copy_(kept)


@pytest.mark.usefixtures("own_cache")
def test_presets_are_run_for_the_curve(pipe: Any, least: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is timed twice at least; one that has no memory is left out, and where the machine was busy that is said."""
    draw, drawn = Runs.draw, []

    def slower(runs: Runs, sample: Any, config: PatchConfig | None = None) -> Any:
        made = draw(runs, sample, config)
        if config is None or config.method != "elfatt":
            return made
        drawn.append(made)
        return dataclasses.replace(made, seconds=len(drawn) * 2.0)

    monkeypatch.setattr(Runs, "draw", slower)
    left_out = "elfatt-quality is left out of the curve: memory ran out"
    with out_of_memory(pipe, "elfatt-quality", NO_MEMORY[0]), pytest.warns(UserWarning, match=left_out):
        tuned = tune(pipe, closeness=99, **least | {"presets": True})
    first = {point.name: point for point in reversed(tuned.points)}  # a proof of one comes later
    assert "elfatt-quality" not in first
    for name in ("elfatt", "elfatt-fast"):
        assert (len(first[name].closeness), len(first[name].speed)) == (1, 2)
    said = str(tuned).splitlines()
    assert any(line.split()[:2] == ["elfatt", "busy"] for line in said)
    assert sum("the machine was busy: equal runs took 2.00 to 4.00 s" in line for line in said) == 1
    assert not any(line.split()[:2] == ["elfatt-fast", "busy"] for line in said)


@pytest.fixture
def runs(pipe: Any) -> Runs:
    return Runs(pipe, Settings(6, height=48, width=48))


@pytest.fixture
def calls(pipe: Any) -> Iterator[list[None]]:
    """One for each call of the denoiser that is computed."""
    found: list[None] = []
    handle = pipe.unet.conv_in.register_forward_pre_hook(lambda *_: found.append(None))
    yield found
    handle.remove()


def test_what_is_known_is_not_computed_and_nothing_changes(runs: Runs, calls: list[None]) -> None:
    plain, late = runs.draw(SAMPLE), runs.draw(SAMPLE, LATE)
    every, _ = len(calls) // 2, calls.clear()
    assert runs.draw_from(3, SAMPLE, LATE).frames == late.frames, "it is recorded first"
    assert len(calls) == 2 * every - 3
    calls.clear()
    assert runs.draw_recorded(SAMPLE).same(plain)
    assert len(calls) == every
    calls.clear()
    assert runs.draw_from(3, SAMPLE, LATE).frames == late.frames
    assert len(calls) == every - 3
    calls.clear()
    assert runs.draw_from(0, SAMPLE, LATE).frames == late.frames
    assert len(calls) == every
    before = runs.steps_done
    runs.pace()
    assert runs.steps_done == before + 1, "steps that are not computed do not count as done"
    assert runs.draw(SAMPLE).same(plain), "the forward is put back"


def test_deviations_are_of_pixels_before_and_after_rounding(runs: Runs) -> None:
    plain, late = (np.asarray(runs.draw(SAMPLE, config).frames[0], dtype=float) for config in (None, LATE))
    far = runs.deviation(3, SAMPLE, LATE)
    assert far.rounded == pytest.approx(((plain - late) ** 2).mean())
    assert 0 < far.mse != far.rounded
    assert abs(far.mse - far.rounded) < 0.5
    assert runs.deviation(3, SAMPLE, PatchConfig("sd")) == (0.0, 0.0)


def test_a_denoiser_that_was_compiled_in_place_is_left_alone(pipe: Any, runs: Runs, calls: list[None]) -> None:
    pipe.unet.compile(backend="eager")
    try:
        late = runs.draw(SAMPLE, LATE)
        calls.clear()
        for _ in range(2):
            assert runs.draw_from(3, SAMPLE, LATE).frames == late.frames
        assert len(calls) == 3 * 7, "recording was tried once; all steps are computed"
        assert "forward" not in vars(pipe.unet)
    finally:
        pipe.unet._compiled_call_impl = None


@pytest.mark.parametrize("content", [b"", b"null", b"{}", b'{"a": 1}', b'{"a": {"bases": [{}]}}', b"\xff\xfe"])
def test_what_is_damaged_is_measured_again(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELFATT_SD_CACHE", str(tmp_path))
    store, figures = Store({"a": 1}), {"layer": LayerFigures([Phase(1.0, "sampled")], seconds=[0.5], calls=3)}
    for name in ("layers", "stretch"):
        (store.folder / f"{name}.json").write_bytes(content)
    assert store.known("layers", lambda: {"layer": figures["layer"].to_dict()}, read_figures) == figures
    assert store.known("stretch", lambda: 2.5, float) == 2.5
    assert store.known("stretch", lambda: 7.0, float) == 2.5, "it was not kept"


def test_the_folder_is_the_same_in_every_process(pipe: Any) -> None:
    """Diffusers notes which settings of a scheduler are defaults, in an order that changes with Python's hash seed."""
    runs = Runs(pipe, Settings(4))
    record = tuning._record(runs)
    kind, config = type(pipe.scheduler), pipe.scheduler.config
    pipe.scheduler = kind.from_config(config)
    noted = pipe.scheduler.config["_use_default_values"]
    pipe.scheduler.register_to_config(_use_default_values=["another", *noted])
    assert tuning._record(runs) == record
    pipe.scheduler = kind.from_config(config, beta_start=2 * config["beta_start"])
    assert tuning._record(runs) != record
