"""The recipe: a tiny run from nothing to a loadable pipeline, and the same after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from safetensors.torch import load_file
from support.checks import check_killed_run, check_same

from elfatt_sd.errors import ElfattError
from elfatt_sd.toy import TOY
from elfatt_sd.toy.renderer import sample_parameters
from tools.toy import export, growing, models, recipe, training

TINY = ["--config", "tiny", "--device", "cpu"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("recipe")
    recipe.main(["--out", str(out), *TINY])
    return out


def weights(out: Path) -> dict[str, torch.Tensor]:
    files = sorted(out.glob("pipeline/*/*.safetensors")) + sorted(out.glob("weights-classifier/*.safetensors"))
    return {f"{path.parent.name}.{name}": value for path in files for name, value in load_file(path).items()}


def test_a_tiny_run_exports_a_pipeline(trained):
    pipeline = StableDiffusionPipeline.from_pretrained(trained / "pipeline")
    pipeline.set_progress_bar_config(disable=True)
    image = pipeline("a red star", num_inference_steps=2, output_type="np").images
    assert image.shape == (1, 64, 64, 3)
    assert {value.dtype for value in weights(trained).values()} == {torch.float16}
    assert list(export.load_record(trained / "pipeline")["stages"]) == list(recipe.STAGES)
    assert (trained / "pipeline" / "README.md").is_file()


def test_a_finished_run_is_not_run_again(trained, monkeypatch):
    before = weights(trained)
    monkeypatch.setattr(training, "_steps", lambda *_: pytest.fail("trained again"))
    recipe.main(["--out", str(trained), *TINY])
    check_same(before, weights(trained))


def test_a_killed_run_goes_on_to_the_same_weights(trained, tmp_path):
    """Killed without warning in the third stage, after its first checkpoints."""
    check_killed_run("tools.toy.recipe", recipe.main, TINY, tmp_path, "layout.pt")
    check_same(weights(trained), weights(tmp_path))


def test_training_goes_on_from_exported_weights(trained, tmp_path):
    source = ["--resume-from", str(trained / "pipeline"), "--stages", "finish"]
    recipe.main(["--out", str(tmp_path), *TINY, *source])
    before, after = weights(trained), weights(tmp_path)
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert all(name in same for name in before if name.startswith(("vae", "weights-classifier")))
    moved = [(after[n].float() - before[n].float()).abs().max() for n in before if n.startswith("unet")]
    assert 0 < max(moved) < 0.2
    assert list(export.load_record(tmp_path / "pipeline")["stages"]) == [*recipe.STAGES, "finish (2)"]


def test_training_of_the_weights_in_the_package_can_go_on(tmp_path):
    """What only training needs lies in the tools, not beside these weights."""
    workshop = recipe.Workshop(recipe.full_recipe(1), tmp_path, 0, torch.device("cpu"))
    workshop.load(TOY)
    assert {"vae", "classifier", "finish"} <= workshop.records.keys()


def test_resuming_from_nothing_is_named(tmp_path):
    with pytest.raises(ElfattError, match="0 safetensors files"):
        export.load_half(torch.nn.Linear(1, 1), tmp_path)


def test_the_inner_levels_are_those_of_the_unet():
    """Fed with what the outer level hands down, they hand up what the outer level gets."""
    torch.manual_seed(0)
    unet: UNet2DConditionModel = models.build("unet", models.TINY).eval()
    seen = {}
    unet.down_blocks[0].downsamplers[0].register_forward_hook(lambda _m, _i, out: seen.update(down=out))
    unet.up_blocks[2].upsamplers[0].register_forward_hook(lambda _m, args, _o: seen.update(up=args[0]))
    noisy, context = torch.randn(2, 4, 16, 16), torch.randn(2, 7, models.TINY.text)
    timesteps = torch.tensor([3, 700])
    with torch.no_grad():
        unet(noisy, timesteps, context)
        inner = growing.inner_levels(unet, seen["down"], timesteps, context, 1)
    torch.testing.assert_close(inner, seen["up"])


def test_training_attention_is_exact_without_a_limit():
    torch.manual_seed(0)
    unet = models.build("unet", models.TINY).eval()
    inputs = torch.randn(2, 4, 16, 16), torch.tensor([3, 700]), torch.randn(2, 7, models.TINY.text)
    with torch.no_grad():
        expected = unet(*inputs).sample
        growing.train_with(unet, None)
        torch.testing.assert_close(unet(*inputs).sample, expected, rtol=1e-4, atol=1e-5)
        growing.train_with(unet, 4)
        assert not torch.allclose(unet(*inputs).sample, expected, atol=1e-4)


def test_the_code_is_undone_by_its_frame():
    images = torch.rand(2, 3, 5, 5) * 2 - 1
    code = models.encode_code(images)
    frame = torch.tensor(models.FRAME, dtype=torch.float32) / 2
    torch.testing.assert_close(torch.einsum("kc,nkhw->nchw", frame, code) + models.CENTER, images)


def test_the_object_weighs_more_than_the_rest():
    _, geometry = sample_parameters(4, torch.Generator().manual_seed(0))
    weights = recipe.object_weights(geometry, 64)
    torch.testing.assert_close(weights.mean((1, 2, 3)), torch.ones(4))
    for weight, (x, y, radius, *_) in zip(weights[:, 0], geometry.tolist(), strict=True):
        centre, edge = weight[int(64 * y), int(64 * x)], weight[int(64 * y), int(64 * (x + 1.4 * radius))]
        assert abs(centre / edge - recipe.OBJECT_WEIGHT) < 1e-5


def test_a_checkpoint_is_old_or_new_but_never_broken(tmp_path, monkeypatch):
    path = tmp_path / "state.pt"
    training.save({"step": 1}, path)

    def fail(state, target):
        target.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(KeyboardInterrupt):
        training.save({"step": 2}, path)
    assert torch.load(path, weights_only=True) == {"step": 1}


def test_the_rate_rises_holds_and_falls():
    stage = training.Stage("x", 1, 1.0, steps=100, hold=0.5)
    assert stage.rate_at(0) < 0.1
    assert stage.rate_at(0.3) == 1
    assert abs(stage.rate_at(0.75) - 0.5) < 1e-9
    assert stage.rate_at(1) == 0
    assert stage.progress(50, 1e9) == 0.5
    assert training.Stage("x", 1, 1.0, seconds=10).progress(0, 5) == 0.5
