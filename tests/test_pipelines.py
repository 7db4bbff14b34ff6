"""Loading a pipeline, and every way in which that can fail."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import pytest
import tiny_pipelines as tiny
import torch
from safetensors.torch import load_file, save_file

import elfatt_sd
from elfatt_sd.config import ElfattError
from elfatt_sd.pipelines import pick_device, pick_dtype


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
    pictures = [
        tiny.quiet(each)(
            "a", num_inference_steps=2, generator=torch.Generator().manual_seed(0), output_type="pt"
        ).images
        for each in (pipe, other)
    ]
    assert torch.equal(*pictures)


def test_a_directory_is_loaded_as_it_was_saved(saved: Path, folder: Path) -> None:
    pipe = elfatt_sd.load_pipeline(saved, device="cpu")
    original = tiny.sd15(folder, sample_size=8)
    assert isinstance(pipe, diffusers.StableDiffusionPipeline)
    assert pipe.unet.dtype == torch.float32
    draws_the_same(pipe, original)


@pytest.mark.parametrize("dtype", ["bfloat16", "bf16", torch.bfloat16])
def test_dtype(saved: Path, dtype: Any) -> None:
    pipe = elfatt_sd.load_pipeline(str(saved), device="cpu", dtype=dtype)
    assert {pipe.unet.dtype, pipe.vae.dtype, pipe.text_encoder.dtype} == {torch.bfloat16}


def test_a_part_can_be_given(damaged: Path) -> None:
    shutil.rmtree(damaged / "scheduler")
    scheduler = tiny.ddim()
    assert elfatt_sd.load_pipeline(damaged, device="cpu", scheduler=scheduler).scheduler is scheduler


def refused(model: Any, match: str, **options: Any) -> None:
    with pytest.raises(ElfattError, match=match) as caught:
        elfatt_sd.load_pipeline(model, **{"device": "cpu", **options})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", ["missing.safetensors", "/nowhere/at/all", "a b", "./no/such"])
def test_a_path_that_does_not_exist(model: str) -> None:
    refused(model, "does not exist; give 'toy', a diffusers directory")


@pytest.mark.parametrize("name", ["model.ckpt", "model.pt", "model.pth", "model.bin", "MODEL.CKPT"])
@pytest.mark.parametrize("present", [True, False])
def test_pickles_are_refused_before_they_are_opened(tmp_path: Path, name: str, present: bool) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "sprung",))

    if present:
        torch.save({"state_dict": Trap()}, tmp_path / name)
    refused(tmp_path / name, r"is a pickle.*convert it to \.safetensors.*--allow-pickle")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("part", ["unet", "vae", "text_encoder"])
def test_a_directory_of_pickles_is_refused(damaged: Path, part: str) -> None:
    (weights,) = (damaged / part).glob("*.safetensors")
    weights.rename(weights.with_suffix(".bin"))
    refused(damaged, rf"no \.safetensors weights in {part}")


def test_pickles_are_loaded_where_that_is_asked_for(saved: Path, folder: Path, tmp_path: Path) -> None:
    tiny.sd15(folder, sample_size=8).save_pretrained(tmp_path, safe_serialization=False)
    refused(tmp_path, "--allow-pickle")
    pipe = elfatt_sd.load_pipeline(tmp_path, device="cpu", allow_pickle=True)
    original = elfatt_sd.load_pipeline(saved, device="cpu")
    assert torch.equal(pipe.unet.conv_in.weight, original.unet.conv_in.weight)


def test_an_index_that_is_missing_or_damaged(damaged: Path) -> None:
    index = damaged / "model_index.json"
    index.write_text("{")
    refused(damaged, "model_index.json is not valid JSON")
    index.write_text("[1, 2]")
    refused(damaged, "model_index.json")
    index.write_bytes(b"\xff\xfe\x00")
    refused(damaged, "model_index.json")
    index.unlink()
    refused(damaged, "has no model_index.json")


@pytest.mark.parametrize("part", ["unet", "vae", "text_encoder", "tokenizer", "scheduler"])
def test_a_part_that_is_missing(damaged: Path, part: str) -> None:
    shutil.rmtree(damaged / part)
    refused(damaged, f"lacks a part: {part}")


def test_a_class_that_diffusers_does_not_have(damaged: Path) -> None:
    index = damaged / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "_class_name": "NoSuchPipeline"}))
    refused(damaged, "could not be loaded")


def test_weights_that_are_cut_off(damaged: Path) -> None:
    (weights,) = (damaged / "unet").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    refused(damaged, "could not be loaded")


def test_weights_that_do_not_fit_their_configuration(damaged: Path) -> None:
    config = damaged / "unet" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "cross_attention_dim": 8}))
    refused(damaged, "could not be loaded")


KINDS = [
    (["model.diffusion_model.a", "cond_stage_model.transformer.a"], "StableDiffusionPipeline"),
    (["model.diffusion_model.a", "cond_stage_model.model.a"], "StableDiffusionPipeline"),
    (
        ["model.diffusion_model.a", "conditioner.embedders.0.transformer.a", "conditioner.embedders.1.model.a"],
        "StableDiffusionXLPipeline",
    ),
    (["model.diffusion_model.a", "conditioner.embedders.0.model.a"], "StableDiffusionXLImg2ImgPipeline"),
]


@pytest.mark.parametrize(("names", "kind"), KINDS)
def test_single_files_by_what_they_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path, names: list[str], kind: str
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({name: torch.zeros(1) for name in names}, path)
    given = {}

    def from_single_file(place: str, **options: Any) -> Any:
        given.update(options, path=place)
        return tiny.sd15(folder)

    monkeypatch.setattr(getattr(diffusers, kind), "from_single_file", from_single_file)
    elfatt_sd.load_pipeline(path, device="cpu", dtype="float32", config="somewhere")
    assert given.pop("dtype" if "dtype" in given else "torch_dtype") == torch.float32
    assert given == {"path": str(path), "config": "somewhere"}


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pipeline's weights in a single file, as Stable Diffusion 1.x has them; its configuration is in `parts`."""

    def unreachable(*_: Any, **__: Any) -> Any:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("diffusers.loaders.single_file.snapshot_download", unreachable)
    weights = tiny.original_checkpoint(elfatt_sd.load_pipeline(saved, device="cpu"))
    save_file(weights, tmp_path / "model.safetensors")
    shutil.copytree(saved, tmp_path / "parts", ignore=shutil.ignore_patterns("*.safetensors"))
    return tmp_path / "model.safetensors"


def test_a_single_file_draws_what_its_directory_draws(checkpoint: Path, saved: Path) -> None:
    pipe = elfatt_sd.load_pipeline(checkpoint, device="cpu", config=str(checkpoint.parent / "parts"))
    assert type(pipe) is diffusers.StableDiffusionPipeline
    draws_the_same(pipe, elfatt_sd.load_pipeline(saved, device="cpu"))


def test_a_single_file_takes_the_configuration_that_lies_beside_it(checkpoint: Path, saved: Path) -> None:
    beside = checkpoint.rename(checkpoint.parent / "parts" / checkpoint.name)
    pipe = elfatt_sd.load_pipeline(beside, device="cpu")
    draws_the_same(pipe, elfatt_sd.load_pipeline(saved, device="cpu"))


def test_a_pickled_single_file_is_loaded_where_that_is_asked_for(checkpoint: Path, saved: Path) -> None:
    pickled = checkpoint.parent / "parts" / "model.ckpt"
    torch.save({"state_dict": load_file(checkpoint)}, pickled)
    refused(pickled, "is a pickle")
    pipe = elfatt_sd.load_pipeline(pickled, device="cpu", allow_pickle=True)
    draws_the_same(pipe, elfatt_sd.load_pipeline(saved, device="cpu"))


def test_a_configuration_of_another_kind_beside_a_single_file_is_not_taken(checkpoint: Path) -> None:
    index = checkpoint.parent / "model_index.json"
    index.write_text(json.dumps({"_class_name": "StableDiffusionXLPipeline"}))
    refused(checkpoint, "could not be loaded: the hub was asked")
    index.write_text("{")
    refused(checkpoint, "model_index.json is not valid JSON")


def test_single_files_that_are_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"not at all")
    refused(path, r"is not a readable \.safetensors file")
    save_file({"lora.up": torch.zeros(1)}, path)
    refused(path, "is not a Stable Diffusion checkpoint")
    other = tmp_path / "model.txt"
    other.write_text("hello")
    refused(other, r"model\.txt' is not a checkpoint; give a \.safetensors")


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "", "cpu:3", "cuda:99", "meta", "xla"])
def test_devices_that_are_not_there(device: str) -> None:
    refused("toy", f"device='{device}' is not", device=device)


@pytest.mark.parametrize("dtype", ["float", "int8", "fp8", "", torch.int32, torch.float64])
def test_dtypes_that_are_not_known(dtype: Any) -> None:
    refused("toy", "is not known; accepted: auto, float32", dtype=dtype)


def test_defaults() -> None:
    assert pick_dtype("auto", torch.device("cpu")) == torch.float32
    assert pick_dtype("auto", torch.device("cuda")) == torch.float16
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type in ("cpu", "cuda", "mps")


def test_a_hub_id_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: str, **options: Any) -> Any:
        assert options["use_safetensors"] is True
        raise OSError(f"cannot reach the hub for {name}\nmore lines")

    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", unreachable)
    refused("owner/name", "model='owner/name' could not be loaded from the hub, and .* here: cannot reach the hub")


def test_the_cause_of_a_failed_download_is_named_in_one_bearable_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: str, **options: Any) -> Any:
        raise OSError("look at the stacktrace above") from ConnectionError(
            "404\n\nRepository Not Found " + "for a while " * 99
        )

    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", unreachable)
    refused("owner/name", r"here: 404 Repository Not Found for a while .{100,200} \.\.\.$")
