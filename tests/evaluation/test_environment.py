"""What decides images beside the protocol, and what is read of the machine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elfatt_sd.evaluation import environment
from elfatt_sd.evaluation.environment import describe_environment, read_high_water_mark, same_images, sha256_of_code
from elfatt_sd.evaluation.protocols import Cell

SD = Cell("sd", "SD", "sd", role="baseline")
TOME = Cell("tome", "ToMe", "tome")
XFORMERS = Cell("xf", "ToMe", "tome", settings={"attention_backend": "xformers"})
NATIVE = Cell("native", "ToMe", "tome", settings={"attention_backend": "native"})
PEER = Cell("peer", "tomesd", "tome", peer="tomesd")
EVERY = {"sd", "tome", "xf", "native", "peer"}


def described(**changes: Any) -> dict[str, Any]:
    packages = {"torch": "2", "diffusers": "0", "transformers": "5", "tomesd": "1", "numpy": "2", "flash-attn": "2"}
    hashes = {f"{name}_sha256": "00" for name in ("model", "prompts", "code", "method")}
    found = {"elfatt_sd": "0.1", "commit": "abc", "device": "2 cores", "cpu_threads": 2, "cuda": None, **hashes}
    return {**found, **changes, "packages": {**packages, **changes.get("packages", {})}}


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({"packages": {"torch": "3"}}, EVERY),
        ({"packages": {"transformers": "6"}}, EVERY),
        ({"packages": {"tomesd": "2"}}, {"peer"}),
        ({"packages": {"flash-attn": "3"}}, {"tome"}),
        ({"packages": {"xformers": "1"}}, {"xf"}),
        ({"packages": {"numpy": "3"}}, set()),
        ({"method_sha256": "11"}, {"tome", "xf", "native"}),
        ({"model_sha256": "11"}, EVERY),
        ({"code_sha256": "11"}, EVERY),
        ({"cpu_threads": 1}, EVERY),
        ({"commit": "def", "elfatt_sd": "0.2"}, set()),
    ],
)
def test_rows_differ_by_what_they_use(changes: dict[str, Any], rows: set[str]) -> None:
    """A thread more changes pixels on the CPU: measured on the toy."""
    cells = (SD, TOME, XFORMERS, NATIVE, PEER)
    assert {cell.name for cell in cells if same_images(described(), described(**changes), [cell])} == rows
    assert bool(same_images(described(), described(**changes), cells)) == bool(rows)


def test_a_gpus_numbers_do_not_hang_on_threads_but_on_its_settings() -> None:
    cuda = {"runtime": "13", "cudnn": 9, "tf32": False, "driver": "580"}
    before = described(cuda=cuda)
    assert same_images(before, described(cuda={**cuda, "driver": "590"}, cpu_threads=64), [TOME]) == []
    assert same_images(before, described(cuda={**cuda, "tf32": True}), [TOME]) == ["tf32: False there, True here"]


def test_this_machine_is_itself() -> None:
    here = describe_environment(torch.device("cpu"))
    assert same_images(here, here, [SD, TOME, PEER]) == []
    assert here["packages"]["torch"]


CODE = '''
"""A module."""
def double(x):
    """Twice x."""
    return 2 * x  # exactly
'''


def test_the_hash_of_code_is_of_what_it_does() -> None:
    found = sha256_of_code([CODE])
    assert found == sha256_of_code(["def double(x):\n\n    return (2\n        * x)\n"])
    assert found != sha256_of_code([CODE.replace("2 * x", "3 * x")])
    assert found != sha256_of_code([CODE, CODE])


def test_clocks_are_those_of_the_device_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own number: `CUDA_VISIBLE_DEVICES` gives another card the index 0."""
    asked: list[tuple[str, ...]] = []

    def answer(*command: str) -> str:
        asked.append(command)
        return "1980, 2619, 1980, 31, 75.5"

    properties = SimpleNamespace(uuid="0f2c")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(environment, "_first_line", answer)
    assert environment.read_clocks(torch.device("cuda", 0))["clocks.sm"] == "1980"
    assert "--id=GPU-0f2c" in asked[0]


def test_the_high_water_mark_counts_what_was_held() -> None:
    before = read_high_water_mark()
    if before is None:
        pytest.skip("this system does not tell")
    size = before + 2**26
    block = bytearray(size)
    block[::4096] = b"1" * len(range(0, size, 4096))
    after = read_high_water_mark()
    assert after is not None
    assert after > size
