"""Loading a pipeline, and every way in which that can fail."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny_pipelines as tiny

import elfatt_sd
from elfatt_sd.errors import ElfattError, ElfattFailure
from elfatt_sd.loading import pick_device, pick_dtype


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
    refused(model, "does not exist; give 'toy' or 'toy-dit', a diffusers directory")


@pytest.mark.parametrize("model", [None, 5, b"toy", ["toy"]])
def test_what_is_no_name_and_no_path(model: Any) -> None:
    with pytest.raises(ElfattError, match=f"{re.escape(f'model={model!r}')} is not accepted; give a name or a path"):
        elfatt_sd.load_pipeline(model)


def test_hidden_files_are_no_part_of_a_model(damaged: Path) -> None:
    (damaged / "unet" / "._diffusion_pytorch_model.fp16.safetensors").write_bytes(b"a fork")
    (damaged / "unet" / ".ipynb_checkpoints").mkdir()
    assert elfatt_sd.load_pipeline(damaged, device="cpu").unet is not None


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
    refused(damaged, "model_index.json names no pipeline")
    index.write_bytes(b"\xff\xfe\x00")
    refused(damaged, "model_index.json names no pipeline")
    for text in ("[1, 2]", "{}", '{"_class_name": 3}'):
        index.write_text(text)
        refused(damaged, "names no pipeline")
    index.unlink()
    refused(damaged, "has no model_index.json")


@pytest.mark.parametrize("part", ["unet", "vae", "text_encoder", "tokenizer", "scheduler"])
def test_a_part_that_is_missing(damaged: Path, part: str) -> None:
    shutil.rmtree(damaged / part)
    refused(damaged, f"lacks a part: {part}")


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"_class_name": "NoSuchPipeline"}, "NoSuchPipeline"), ({"unet": ["diffusers", "NoSuchModel"]}, "NoSuchModel")],
)
def test_a_class_that_diffusers_does_not_have(damaged: Path, changes: dict[str, Any], name: str) -> None:
    index = damaged / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), **changes}))
    refused(damaged, f"could not be loaded: the installed diffusers .* has no {name}; pip install -U diffusers")


def test_weights_that_are_cut_off(damaged: Path) -> None:
    (weights,) = (damaged / "unet").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    refused(damaged, "could not be loaded")


def test_weights_that_do_not_fit_their_configuration(damaged: Path) -> None:
    config = damaged / "unet" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "cross_attention_dim": 8}))
    refused(damaged, "could not be loaded")


FIRST = "model.diffusion_model.input_blocks.0.0.weight"
SDXL = ("conditioner.embedders.0.transformer.a", "conditioner.embedders.1.model.a")
KINDS = [
    (4, ("cond_stage_model.transformer.a",), "StableDiffusionPipeline"),
    (4, ("cond_stage_model.model.a",), "StableDiffusionPipeline"),
    (7, ("cond_stage_model.model.a",), "StableDiffusionUpscalePipeline"),
    (9, ("cond_stage_model.transformer.a",), "StableDiffusionInpaintPipeline"),
    (4, SDXL, "StableDiffusionXLPipeline"),
    (9, SDXL, "StableDiffusionXLInpaintPipeline"),
    (8, SDXL, "StableDiffusionXLInstructPix2PixPipeline"),
    (4, ("conditioner.embedders.0.model.a",), "StableDiffusionXLImg2ImgPipeline"),
]


def fake_checkpoint(path: Path, channels: int, *names: str) -> Path:
    save_file({FIRST: torch.zeros(8, channels, 3, 3), **{name: torch.zeros(1) for name in names}}, path)
    return path


@pytest.mark.parametrize(("channels", "names", "kind"), KINDS)
def test_single_files_by_what_they_hold(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    channels: int,
    names: tuple[str, ...],
    kind: str,
) -> None:
    path = fake_checkpoint(tmp_path / "model.safetensors", channels, *names)
    given = {}

    def from_single_file(place: str, **options: Any) -> Any:
        given.update(options, path=place)
        return tiny.sd15(folder)

    monkeypatch.setattr(getattr(diffusers, kind), "from_single_file", from_single_file)
    elfatt_sd.load_pipeline(path, device="cpu", dtype="float32", config="somewhere")
    assert given.pop("dtype" if "dtype" in given else "torch_dtype") == torch.float32
    assert given == {"path": str(path), "config": "somewhere"}


@pytest.mark.parametrize(
    ("channels", "names", "says"),
    [
        (6, (), r"Stable Diffusion, and its UNet takes 6 channels.*accepted: 4, 5, 7, 8, 9"),
        (5, SDXL, "SDXL, and its UNet takes 5 channels"),
        (9, ("conditioner.embedders.0.model.a",), "the SDXL refiner, and its UNet takes 9 channels"),
        (5, (), "StableDiffusionDepth2ImgPipeline' has no attribute 'from_single_file'"),
    ],
)
def test_single_files_that_no_pipeline_fits(tmp_path: Path, channels: int, names: tuple[str, ...], says: str) -> None:
    refused(fake_checkpoint(tmp_path / "model.safetensors", channels, *names), says)


def header(content: bytes) -> bytes:
    return len(content).to_bytes(8, "little") + content


@pytest.mark.parametrize(
    "content",
    [
        b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n",
        b"<!DOCTYPE html><html></html>",
        b"GGUF\3\0\0\0",
        b"PK\3\4" + bytes(40),
        b"",
        b"not at all",
        header(b"[]"),
        header(b'{"a": 5}'),
        header(b'{"a": {"shape": "x", "data_offsets": [0, 0]}}'),
        header(b"[" * 100_000),
        header(b'{"\xff": {}}'),
    ],
    ids=range(11),
)
def test_files_without_weights_are_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    refused(tmp_path / "model.safetensors", r"model\.safetensors' is not a readable \.safetensors file: .*[Ee]rror")


def test_other_weights_are_no_checkpoint(tmp_path: Path) -> None:
    save_file({"lora_unet_a.lora_up.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    refused(tmp_path / "model.safetensors", f"is not a Stable Diffusion checkpoint: it has no '{FIRST}'")


def test_what_is_no_pipeline_s_directory(saved: Path, tmp_path: Path) -> None:
    for place in (tmp_path, saved / "unet"):
        refused(place, "has no model_index.json; give a diffusers pipeline directory")
    refused(saved / "model_index.json", "is not a checkpoint; give a .safetensors file, or a directory")


def test_a_tokenizer_without_words_is_refused(damaged: Path) -> None:
    """It would load, and draw wrong images."""
    for file in (damaged / "tokenizer").iterdir():
        if file.name != "tokenizer_config.json":
            file.unlink()
    refused(damaged, "has no vocabulary in tokenizer")


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_damaged_part_is_refused_in_one_line(damaged: Path, content: str | None) -> None:
    for file in (damaged / "scheduler").iterdir():
        if content is None:
            file.unlink()
        else:
            file.write_text(content)
    refused(damaged, "could not be loaded: ")


def test_a_name_that_no_file_can_have() -> None:
    refused(Path("x" * 5000), "^model='x{240}' does not exist")


@pytest.mark.parametrize("damage", [100, -2])
def test_a_single_file_that_is_cut_off(tmp_path: Path, damage: int) -> None:
    path = fake_checkpoint(tmp_path / "model.safetensors", 4)
    path.write_bytes(path.read_bytes()[:damage])
    refused(path, r"is not a readable \.safetensors file: ")


@pytest.mark.parametrize("suffix", ["safetensors", "ckpt"])
def test_an_inpainting_checkpoint_is_loaded_as_that(folder: Path, tmp_path: Path, suffix: str) -> None:
    parts = {**tiny.sd15_parts(folder, sample_size=8, in_channels=9), "requires_safety_checker": False}
    pipe = diffusers.StableDiffusionInpaintPipeline(**parts)
    pipe.save_pretrained(tmp_path)
    for file in tmp_path.glob("*/*.safetensors"):
        file.unlink()
    path, weights = tmp_path / f"model.{suffix}", tiny.original_checkpoint(pipe)
    if suffix == "ckpt":
        torch.save({"state_dict": weights}, path)
    else:
        save_file(weights, path)
    loaded = elfatt_sd.load_pipeline(path, device="cpu", allow_pickle=suffix == "ckpt")
    assert type(loaded) is diffusers.StableDiffusionInpaintPipeline
    assert torch.equal(loaded.unet.conv_in.weight, pipe.unet.conv_in.weight)


@pytest.fixture
def half(saved: Path, folder: Path, tmp_path: Path) -> Path:
    """A directory with weights of the variant fp16 alone."""
    tiny.sd15(folder, sample_size=8).save_pretrained(tmp_path / "half", variant="fp16")
    return tmp_path / "half"


def test_a_variant_is_loaded_or_named_as_the_remedy(half: Path, saved: Path) -> None:
    refused(half, r"a variant alone in text_encoder, unet, vae; give variant='fp16' \(--variant fp16\)")
    draws_the_same(elfatt_sd.load_pipeline(half, device="cpu", variant="fp16"), elfatt_sd.load_pipeline(saved))
    refused(half, "variant='fp8' is not in model=.*; there is: 'fp16'", variant="fp8")
    refused(saved, "variant='fp16' is not in model=.*; there is: weights without a variant alone", variant="fp16")


def test_one_part_of_a_variant_is_named(damaged: Path) -> None:
    weights = damaged / "unet" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_name("diffusion_pytorch_model.fp16-00001-of-00002.safetensors"))
    refused(damaged, "a variant alone in unet; give variant='fp16'")


def test_a_single_file_has_no_variant(tmp_path: Path) -> None:
    path = fake_checkpoint(tmp_path / "model.safetensors", 4)
    refused(path, "variant='fp16' is for a directory or a hub id", variant="fp16")


def test_half_precision_on_a_cpu_is_warned_of(saved: Path) -> None:
    with pytest.warns(UserWarning, match="dtype='float16' is many times slower than float32 on a CPU"):
        elfatt_sd.load_pipeline(saved, device="cpu", dtype="float16")


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
    refused(checkpoint, "model_index.json names no pipeline")


def test_the_configuration_that_a_single_file_needs_is_named(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> Any:
        raise OSError("cannot find it in the cache") from ConnectionError("Name or service not known")

    monkeypatch.setattr("diffusers.loaders.single_file.snapshot_download", unreachable)
    refused(
        checkpoint, "needs the configuration of a StableDiffusionPipeline.*Name or service.*model_index.json.*config="
    )


def test_files_of_other_kinds(tmp_path: Path) -> None:
    (tmp_path / "model.txt").write_text("hello")
    refused(tmp_path / "model.txt", r"model\.txt' is not a checkpoint; give a \.safetensors")


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


def hub_says(monkeypatch: pytest.MonkeyPatch, text: str, cause: Exception | None = None) -> None:
    def load(name: str, **options: Any) -> Any:
        assert options["use_safetensors"] is True
        raise OSError(text) from cause

    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", load)


def test_a_hub_id_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    hub_says(monkeypatch, "cannot reach the hub for it\nmore lines")
    refused("owner/name", "model='owner/name' could not be loaded from the hub, and .* here: cannot reach the hub")


@pytest.mark.parametrize(
    ("error", "failure"), [(ConnectionError("no route"), True), (TimeoutError("late"), True), (KeyError("x"), False)]
)
def test_a_hub_that_cannot_be_reached_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, error: Exception, failure: bool
) -> None:
    hub_says(monkeypatch, "look above", error)
    with pytest.raises(ElfattError) as caught:
        elfatt_sd.load_pipeline("owner/name", device="cpu")
    assert isinstance(caught.value, ElfattFailure) is failure


def test_the_variant_is_the_remedy_for_the_hub_too(monkeypatch: pytest.MonkeyPatch) -> None:
    hub_says(monkeypatch, "Error no file named diffusion_pytorch_model.safetensors found")
    refused("owner/name", r"give variant='fp16' \(--variant fp16\)")


def test_the_cause_of_a_failed_download_is_named_in_one_bearable_line(monkeypatch: pytest.MonkeyPatch) -> None:
    cause = ConnectionError("404\n\nRepository Not Found " + "for a while " * 99)
    hub_says(monkeypatch, "look at the stacktrace above", cause)
    refused("owner/name", r"here: 404 Repository Not Found for a while .{100,200} \.\.\.$")
