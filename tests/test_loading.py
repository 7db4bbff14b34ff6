"""Loading a pipeline, every way in which that can fail, and schedulers in place of a model's own."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from safetensors.torch import load_file, save_file
from support import tiny_pipelines as tiny

from elfatt_sd.errors import ElfattError, ElfattFailure
from elfatt_sd.loading import SCHEDULERS, call_loader, load_pipeline, make_scheduler, pick_device, pick_dtype


@pytest.fixture(scope="module")
def saved(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline directory."""
    place = tmp_path_factory.mktemp("saved")
    tiny.sd15(folder, sample_size=8).save_pretrained(place)
    return place


@pytest.fixture
def damaged(saved: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def draws_the_same(pipe: Any, other: Any) -> None:
    given: dict[str, Any] = {"num_inference_steps": 2, "output_type": "pt"}
    pictures = [tiny.quiet(each)("a", generator=torch.Generator().manual_seed(0), **given) for each in (pipe, other)]
    assert torch.equal(*(each.images for each in pictures))


def refused(model: Any, match: str, **options: Any) -> ElfattError:
    with pytest.raises(ElfattError, match=match) as caught:
        load_pipeline(model, **{"device": "cpu", **options})
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_directory_is_loaded_as_it_was_saved_without_hidden_files(damaged: Path, folder: Path) -> None:
    (damaged / "unet" / "._diffusion_pytorch_model.fp16.safetensors").write_bytes(b"a fork")
    (damaged / "unet" / ".ipynb_checkpoints").mkdir()
    pipe = load_pipeline(damaged, device="cpu")
    assert isinstance(pipe, diffusers.StableDiffusionPipeline) and pipe.unet.dtype == torch.float32
    draws_the_same(pipe, tiny.sd15(folder, sample_size=8))
    shutil.rmtree(damaged / "scheduler")
    scheduler = tiny.ddim()
    assert load_pipeline(damaged, device="cpu", scheduler=scheduler).scheduler is scheduler, "a part can be given"


def test_dtypes_and_devices(saved: Path) -> None:
    for dtype in ("bf16", torch.bfloat16):
        pipe: Any = load_pipeline(str(saved), device="cpu", dtype=dtype)
        assert {pipe.unet.dtype, pipe.vae.dtype, pipe.text_encoder.dtype} == {torch.bfloat16}
    with pytest.warns(UserWarning, match="dtype='float16' is many times slower than float32 on a CPU"):
        load_pipeline(saved, device="cpu", dtype="float16")
    assert pick_dtype("auto", torch.device("cpu")) == torch.float32
    assert pick_dtype("auto", torch.device("cuda")) == torch.float16
    assert pick_device("cpu") == torch.device("cpu") and pick_device("auto").type in ("cpu", "cuda", "mps")
    for device in ("gpu", "cuda:x", "", "cpu:3", "cuda:99", "meta", "xla"):
        refused("toy", f"device='{device}' is not", device=device)
    for dtype in ("float", "int8", "", torch.float64):
        refused("toy", "is not known; accepted: auto, float32", dtype=dtype)


UNET = "model.diffusion_model."
FIRST = f"{UNET}input_blocks.0.0.weight"


def test_what_is_no_model_is_refused_in_one_line(saved: Path, tmp_path: Path) -> None:
    refused("a b", "does not exist; give 'toy' or 'toy-dit', a diffusers directory")
    for place in (tmp_path, saved / "unet"):
        refused(place, "has no model_index.json; give a diffusers pipeline directory")
    path = tmp_path / "file.safetensors"
    save_file({"lora_unet_a": torch.zeros(1)}, path)
    refused(path, f"it has no '{FIRST}'")
    for content in (
        b"",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n",
        path.read_bytes()[:-2],
    ):
        path.write_bytes(content)
        refused(path, r"is not a readable \.safetensors file: ")


COULD_NOT = "could not be loaded: "
UNFIT = "no file named .*; give variant='fp16' .* or allow pickles with allow_pickle=True"


@pytest.mark.parametrize(
    ("files", "change", "says"),
    [
        ("model_index.json", "{", "model_index.json names no pipeline"),
        ("model_index.json", "{}", "model_index.json names no pipeline"),
        ("vae", None, "lacks a part: vae"),
        ("scheduler", None, "lacks a part: scheduler"),
        ("model_index.json", {"_class_name": "NoSuchPipeline"}, f"{COULD_NOT}.*NoSuchPipeline"),
        ("model_index.json", {"unet": ["diffusers", "NoSuchModel"]}, f"{COULD_NOT}.*NoSuchModel"),
        ("unet/*.safetensors", 1000, COULD_NOT),
        ("unet/config.json", {"cross_attention_dim": 8}, COULD_NOT),
        ("tokenizer/*", None, "has no vocabulary in tokenizer"),  # it would load, and draw wrong images
        ("scheduler/*", "{", COULD_NOT),
        ("unet/*.safetensors", Path("diffusion_pytorch_model.bin"), UNFIT),
        ("unet/*.safetensors", Path("diffusion_pytorch_model.fp16.safetensors"), UNFIT),
    ],
)
def test_a_damaged_directory_is_refused_in_one_line(damaged: Path, files: str, change: Any, says: str) -> None:
    """Files are removed, renamed, cut off, written anew, or have other settings."""
    for path in list(damaged.glob(files)):
        if change is None and path.is_dir():
            shutil.rmtree(path)
        elif change is None:
            path.unlink()
        elif isinstance(change, Path):
            path.rename(path.with_name(change.name))
        elif isinstance(change, int):
            path.write_bytes(path.read_bytes()[:change])
        else:
            path.write_text(change if isinstance(change, str) else json.dumps(json.loads(path.read_text()) | change))
    refused(damaged, says)


@pytest.mark.parametrize("name", ["model.ckpt", "MODEL.BIN"])
def test_pickles_are_refused_before_they_are_opened(tmp_path: Path, name: str) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "sprung",))

    torch.save({"state_dict": Trap()}, tmp_path / name)
    refused(tmp_path / name, r"is a pickle.*convert it to \.safetensors.*--allow-pickle")
    assert not (tmp_path / "sprung").exists()


def test_pickles_and_variants_are_loaded_where_that_is_asked_for(saved: Path, folder: Path, tmp_path: Path) -> None:
    original, pipe = load_pipeline(saved, device="cpu"), tiny.sd15(folder, sample_size=8)
    pickles, half = tmp_path / "pickles", tmp_path / "half"
    pipe.save_pretrained(pickles, safe_serialization=False)
    refused(pickles, "--allow-pickle")
    draws_the_same(load_pipeline(pickles, device="cpu", allow_pickle=True), original)
    pipe.save_pretrained(half, variant="fp16")
    refused(half, "give variant='fp16'")
    draws_the_same(load_pipeline(half, device="cpu", variant="fp16"), original)
    refused(half, "variant='fp8' is not in model=.*; leave it out", variant="fp8")
    refused(saved, "variant='fp16' is not in model=.*; leave it out", variant="fp16")


# Single files.

SDXL = ("conditioner.embedders.0.transformer.a", "conditioner.embedders.1.model.a")
REFINER = ("conditioner.embedders.0.model.a",)


@pytest.mark.parametrize(
    ("channels", "names", "says"),
    [
        (4, (), "needs the configuration of a StableDiffusionPipeline,"),
        (9, (), "of a StableDiffusionInpaintPipeline,"),
        (4, SDXL, "of a StableDiffusionXLPipeline,"),
        (4, REFINER, "of a StableDiffusionXLImg2ImgPipeline,"),
        (8, (), r"takes 8 channels.*accepted: 4 \(StableDiffusionPipeline\), 7 "),
        (5, SDXL, r"takes 5 channels.*accepted: 4 \(StableDiffusionXLPipeline\), 9 "),
        (9, REFINER, "takes 9 channels"),
    ],
)
@pytest.mark.usefixtures("no_hub")
def test_single_files_are_what_they_hold(channels: int, names: tuple[str, ...], says: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({FIRST: torch.zeros(8, channels, 3, 3), **{name: torch.zeros(1) for name in names}}, path)
    refused(path, says)
    refused(path, "variant='fp16' is for a directory or a hub id", variant="fp16")


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> Any:
        raise OSError("cannot find it in the cache") from ConnectionError("Name or service not known")

    monkeypatch.setattr("diffusers.loaders.single_file.snapshot_download", unreachable)


@pytest.mark.usefixtures("no_hub")
def test_a_single_file_draws_as_its_directory(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration is given, or lies beside the file, which has diffusers' names of weights here."""
    same_names = lambda checkpoint, **_: {name.removeprefix(UNET): weight for name, weight in checkpoint.items()}  # noqa: E731
    monkeypatch.setitem(SINGLE_FILE_LOADABLE_CLASSES["UNet2DConditionModel"], "checkpoint_mapping_fn", same_names)
    original = load_pipeline(saved, device="cpu")
    given: dict[str, Any] = {"device": "cpu", "vae": original.vae, "text_encoder": original.text_encoder}
    checkpoint, parts, index = (tmp_path / name for name in ("model.safetensors", "parts", "model_index.json"))
    weights = {UNET + name: weight for name, weight in original.unet.state_dict().items()}
    save_file({FIRST: original.unet.conv_in.weight.detach().clone(), **weights}, checkpoint)
    shutil.copytree(saved, parts, ignore=shutil.ignore_patterns("*.safetensors"))
    pipe = load_pipeline(checkpoint, **given, config=str(parts))
    assert type(pipe) is diffusers.StableDiffusionPipeline
    draws_the_same(pipe, original)
    torch.save({"state_dict": load_file(checkpoint)}, parts / "model.ckpt")
    refused(parts / "model.ckpt", "is a pickle")
    draws_the_same(load_pipeline(parts / "model.ckpt", **given, allow_pickle=True), original)
    index.write_text(json.dumps({"_class_name": "StableDiffusionXLPipeline"}))
    says = "needs the configuration of a StableDiffusionPipeline.*Name or service.*model_index.json.*config="
    assert isinstance(refused(checkpoint, says), ElfattFailure)
    index.write_text("{")
    refused(checkpoint, "model_index.json names no pipeline")
    draws_the_same(load_pipeline(checkpoint.rename(parts / checkpoint.name), **given), original)


@pytest.mark.parametrize(
    ("text", "cause", "failure", "says"),
    [
        ("not there\nmore lines", None, False, "could not be loaded from the hub, and .* here: not there"),
        ("look above", KeyError("x"), False, "from the hub, and"),
        ("look above", TimeoutError("late"), True, "from the hub, which cannot be reached, .*late"),
        ("look", ConnectionError("404\n\nFound " + "for long " * 99), True, r"here: 404 Found .{100,240} \.\.\.$"),
        ("Error no file named model.safetensors found", None, False, r"give variant='fp16' \(--variant fp16\)"),
    ],
)
def test_what_the_hub_says_is_one_bearable_line(
    monkeypatch: pytest.MonkeyPatch, text: str, cause: Exception | None, failure: bool, says: str
) -> None:
    def load(name: str, **options: Any) -> Any:
        assert options["use_safetensors"] is True
        raise OSError(text) from cause

    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", load)
    assert isinstance(refused("owner/name", says), ElfattFailure) is failure


# Schedulers.


def test_every_scheduler_draws_with_the_toy_and_making_it_leaves_no_trace() -> None:
    pipe: Any = load_pipeline("toy", device="cpu", dtype="float32")
    pipe.set_progress_bar_config(disable=True)
    own = pipe.scheduler
    own.set_timesteps(4)
    state, timesteps = torch.get_rng_state(), own.timesteps.clone()
    made = {name: make_scheduler(name, own) for name in SCHEDULERS}
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(own.timesteps, timesteps)
    for name, pipe.scheduler in made.items():
        assert type(pipe.scheduler).__name__ == SCHEDULERS[name]
        assert pipe.scheduler.config.prediction_type == own.config.prediction_type
        generator = torch.Generator().manual_seed(0)
        image = pipe(["owl"], height=32, width=32, num_inference_steps=2, output_type="pt", generator=generator).images
        assert torch.isfinite(image).all() and image.std() > 0.01, name


def test_schedulers_that_would_draw_noise_are_refused() -> None:
    """Of a flow, by what they take the network's output for; of others, by where they begin."""
    flow = {"shift": 3.0}, {"use_dynamic_shifting": True}  # which needs to know the image's size
    wan = diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    fitting: dict[Any, set[str]] = {diffusers.FlowMatchEulerDiscreteScheduler(**each): set() for each in flow}
    for own, expected in {**fitting, wan: {"unipc", "dpm++"}}.items():
        for name in ("ddim", "euler", "unipc", "dpm++", "lcm"):
            if name in expected:
                make_scheduler(name, own)
            else:
                with pytest.raises(ElfattError, match=r"does not fit the model's .*: it (takes|fails)"):
                    make_scheduler(name, own)
    for own, reason in (
        (diffusers.RePaintScheduler(), "fails with the model's settings .*original_image"),
        (diffusers.EDMEulerScheduler(), "its first timestep is 9.* where the model's is 1.0"),
    ):
        with pytest.raises(ElfattError, match=reason):
            make_scheduler("ddim", own)
    with pytest.raises(
        ElfattError, match=r"scheduler='fast' is not known; accepted: ddim, ddpm, .*, lcm, tcd, or a scheduler class"
    ):
        make_scheduler("fast", wan)


def test_what_transformers_says_of_torchvision_is_left_out_while_a_model_is_loaded() -> None:
    logger, told = logging.getLogger("transformers.utils.import_utils"), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.ERROR)  # our commands leave out more
    try:
        for say in (logger.error, lambda text: call_loader("model", logger.error, text)):
            say("`CLIPImageProcessor` requires torchvision (not installed)")
            say("another")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert told == ["`CLIPImageProcessor` requires torchvision (not installed)", "another", "another"]
