"""The command that runs diffusers' own tests, on a small checkout that is made here."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_pipelines as tiny

from elfatt_sd.errors import ElfattError
from tools.diffusers_tests import Comparison, Ending, main, read_endings
from tools.diffusers_tests_plugin import failure_kind

PIPELINE = """
import unittest
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline  # with a UNet

from .. import tiny_pipelines as tiny

HERE = Path(__file__).parent


def draw(pipe):
    return pipe("a b", num_inference_steps=2, generator=torch.Generator().manual_seed(0), output_type="pt").images


class PipelineFastTests(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)
        self.pipe = tiny.sd15(HERE)

    def test_passes(self):
        self.assertEqual(draw(self.pipe).shape, (1, 3, 32, 32))

    def test_fails_untouched(self):
        raise RuntimeError("as the machine is")

    @unittest.skip("slow")
    def test_slow(self):
        raise RuntimeError

    def test_values(self):
        expected = torch.load(HERE / "expected.pt")
        image = draw(self.pipe)
        assert (image - expected).abs().max() < 1e-5

    def test_values_that_may_differ(self):
        self.test_values()

    def test_type(self):
        names = [type(module.processor).__name__ for module in self.pipe.unet.modules() if hasattr(module, "processor")]
        if {*names} != {"AttnProcessor2_0"}:
            raise TypeError("takes 2 positional arguments\\nand more")

    def test_tokenizer(self):
        type(self.pipe.tokenizer).from_pretrained("hf-internal-testing/tiny-random-clip")
"""
MODEL = '''
from diffusers import UNet2DConditionModel

from ...pipelines import tiny_pipelines as tiny


def test_a_bare_unet_gets_our_processors():
    """They stand in for the own ones, which this test does not know."""
    assert {type(processor).__name__ for processor in tiny.unet().attn_processors.values()} != {}
'''


def test_failures_are_told_apart(tmp_path: Path, capsys: Any) -> None:
    """Tests of a pipeline and of a UNet; others are not run."""
    files = {"pipelines/small/test_pipeline.py": PIPELINE, "models/unets/test_unet.py": MODEL}
    files |= dict.fromkeys(("pipelines/small/test_pipeline_flax.py", "models/transformers/test_x.py"), "UNet, 1 / 0")
    for name, text in files.items():
        path = tmp_path / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        for package in [path.parent, *path.parent.parents][: len(Path(name).parts)]:
            (package / "__init__.py").touch()
    pipelines = tmp_path / "tests" / "pipelines"
    shutil.copy(tiny.__file__, pipelines / "tiny_pipelines.py")
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    drawn = tiny.sd15(tmp_path)("a b", num_inference_steps=2, generator=generator, output_type="pt")
    torch.save(drawn.images, pipelines / "small" / "expected.pt")
    known = tmp_path / "known.txt"
    known.write_text("# why\n\n*::test_values_that_may_differ # a reason\n*::test_pas* # none\n")
    words = ["--checkout", tmp_path, "--known", known, "--out", tmp_path / "out", "--offline", "--method", "tome"]
    assert main([str(word) for word in words]) == 1
    said = capsys.readouterr().out
    lines = [line.split() for line in said.splitlines()]
    for group in ("pipelines 7 5 5 2 2 1 1", "UNets 1 1 1 1 0 0 0", "LoRA 0 0 0 0 0 0 0"):
        assert group.split() in lines
    name = "tests/pipelines/small/test_pipeline.py::PipelineFastTests::test_"
    for part in (f"structural: TypeError: takes 2 positional arguments\n    {name}type\n",
                 "\nvalues differ: AssertionError: assert ", f"\n    {name}values\n",
                 "known, but its values are as expected: *::test_pas*"):  # fmt: skip
        assert part in said
    assert f"{name}values_that_may_differ" not in said
    assert main(["--checkout", str(tmp_path / "out")]) == 2  # no tests of UNets


@pytest.mark.parametrize(
    ("error", "statement", "kind"),
    [
        (AssertionError(), "assert np.abs(image_slice.flatten() - expected_slice).max() < 1e-2", "value"),
        (AssertionError("0.3 not less than 0.001"), "self.assertLess(max_diff, expected_max_diff)", "value"),
        (AssertionError("Tensor-likes are not close!"), "torch.testing.assert_close(a, b)", "value"),
        (AssertionError(), "assert image.shape == (1, 64, 64, 3)", "structural"),
        (AssertionError("shape mismatch"), "np.testing.assert_allclose(a, b)", "structural"),
        (ElfattError("close"), "pipe(**inputs)", "structural"),
    ],
)
def test_kinds_of_failures(error: Exception, statement: str, kind: str) -> None:
    assert failure_kind(error, statement) == kind


def test_a_test_that_never_ends_is_structural(tmp_path: Path) -> None:
    lines = [f'{{"test": "{test}", "when": "{when}", "outcome": "{outcome}"}}' for test, when, outcome in (
        ("a", "setup", "passed"), ("a", "call", "passed"), ("b", "setup", "skipped"), ("c", "setup", "passed"),
    )]  # fmt: skip
    lines.append('{"test": "a", "when": "teardown", "outcome": "failed", "kind": "structural", "message": "x"}')
    (tmp_path / "results.jsonl").write_text("\n".join(lines) + "\n")
    endings = read_endings(tmp_path / "results.jsonl")
    assert {test: ending.outcome for test, ending in endings.items()} == {"a": "failed", "b": "skipped", "c": "skipped"}
    compared = Comparison({"d": Ending("passed"), "c": Ending("passed")}, endings, ["*"])
    assert set(compared.failures("structural")) == {"c", "d"}  # killed in the middle, and never begun
    assert read_endings(tmp_path / "nowhere.jsonl") == {}
