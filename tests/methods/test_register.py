"""Attentions of somebody else's: what is refused, and that one works everywhere without touching the package."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import elfatt_sd
from elfatt_sd import ElfattError, PatchConfig, Phase, methods
from elfatt_sd.evaluation.metrics import MetricChoice, load_own
from elfatt_sd.methods import Attention
from elfatt_sd.methods.conformance import check


@dataclass(frozen=True)
class Near(Attention):
    """Every token sees itself and its values, smoothed."""

    name: ClassVar[str] = "near"
    strength: float = 0.5

    def __post_init__(self) -> None:
        if self.strength < 0:
            raise ValueError("strength is\nnegative")

    def attend(self, layer: Any, tokens: torch.Tensor, prepared: Any) -> torch.Tensor:
        return layer.project(tokens)[2] * self.strength

    def cost(self, size: Any) -> float:
        return size.projections(size.tokens, size.tokens)


def broken(frozen: bool = True, base: Any = Near, **members: Any) -> Any:
    own = {"name": "broken", "__module__": __name__, "__qualname__": "Broken", **members}
    annotations = own.pop("__annotations__", {})
    kind = type("Broken", (base,), {**own, "__annotations__": annotations})
    return dataclass(frozen=True)(kind) if frozen else kind


def with_field(default: Any, name: str = "what") -> Any:
    return broken(**{name: default}, __annotations__={name: "Any"})


@pytest.fixture(autouse=True)
def only_for_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "_known", dict(methods._known))


def test_a_registered_attention_is_a_method(pipe: Any) -> None:
    """It runs in a pipeline, and is taken back."""
    assert elfatt_sd.register(Near) is elfatt_sd.register(Near) is Near, "the same class may be registered again"
    config = PatchConfig.preset("near", strength=0.25)  # type: ignore[arg-type,call-arg]
    assert config.phases == (Phase(1.0, Near(0.25)),)
    assert PatchConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.without_effect(["strength", "agents"]) == ["agents"]
    with pytest.raises(ElfattError, match=r"^attention 'near' does not accept strength=-1 .ValueError: .* is negative"):
        PatchConfig.preset("near", strength=-1)  # type: ignore[arg-type,call-arg]
    before = dict(pipe.unet.attn_processors)
    plan = elfatt_sd.plan(pipe, Near())
    assert "near (strength 0.5)" in str(plan)
    assert 0 < plan.multiply_adds_after < plan.multiply_adds_before
    with elfatt_sd.patched(pipe, Near(), autotune=True):
        pipe("a b", num_inference_steps=2, output_type="latent")
    assert dict(pipe.unet.attn_processors) == before


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        (broken(name=""), "give a `name`"),
        (broken(name="sampled"), "'sampled' is taken by elfatt_sd.methods.sampled:Sampled"),
        (broken(name="tome"), "'tome' is taken by the method 'tome'"),
        (broken(name="Cell-Spread"), "'Cell-Spread' is taken by elfatt_sd.methods.sampled:CellSpread"),
        (with_field(math.inf), "'what' is not one that JSON can hold"),
        (with_field(field(default_factory=lambda: 1 / 0)), "'what' is not one that JSON can hold"),
        (with_field(0, "seed"), "'seed' means something else"),
        (broken(frozen=False), "not a frozen dataclass"),
        (broken(base=Attention, cost=lambda self, size: 1.0), "no method attend"),
        (with_field(-1.0, "strength"), "^attention 'broken' does not accept its defaults .ValueError: .* is negative"),
        (3, "give a class derived from"),
    ],
)
def test_what_is_declared_wrongly_is_refused_in_one_line(kind: Any, rule: str) -> None:
    with pytest.raises(ElfattError, match=rule) as caught:
        elfatt_sd.register(kind)
    assert "\n" not in str(caught.value)
    assert set(methods._known) == {kind.name for kind in methods._OWN}


def fail(*_: Any) -> Any:
    raise ValueError("bad\nluck")


def attend(change: Callable[[torch.Tensor, torch.Tensor], Any]) -> dict[str, Any]:
    """What is returned, of the tokens and of their values."""
    return {"attend": lambda self, layer, tokens, prepared: change(tokens, layer.project(tokens)[2])}


@pytest.mark.parametrize(
    ("members", "rule"),
    [
        (attend(lambda tokens, values: tokens), r"returns shape \[2, 64, 16\]"),
        (attend(lambda tokens, values: values.double()), "returns torch.float64"),
        (attend(lambda tokens, values: None), "returns NoneType"),
        (attend(lambda tokens, values: torch.rand_like(values)), "global random state"),
        (attend(lambda tokens, values: values * math.inf), "not finite"),
        (attend(lambda tokens, values: (tokens.mul_(2), values)[1]), "changes the tokens"),
        (attend(lambda tokens, values: values * float(values.sum() > 0)), "reads values of tensors on the host"),
        ({"attend": fail}, r"raises in attend \(ValueError: bad luck\)"),
        ({"prepare": fail}, "raises in prepare"),
        ({"cost": lambda self, size: -1}, "has cost -1"),
        ({"cost": lambda self, size: math.inf}, "has cost inf"),
        ({"prepare": lambda self, grid, draws: 5}, "prepares int"),
        ({"words": lambda self, fitted: 3}, "says itself as 3"),
        ({"words": fail}, "raises in words"),
        ({"prepare": lambda self, grid, draws: random.random() and None}, "global random state"),
        ({"prepare": lambda self, grid, draws: np.random.rand(1) and None}, "global random state"),
    ],
)
def test_what_breaks_a_rule_is_named_and_the_pipeline_stays(pipe: Any, members: dict[str, Any], rule: str) -> None:
    before = dict(pipe.unet.attn_processors)
    attention = broken(**members)()
    with pytest.raises(ElfattError, match=rule) as caught:
        elfatt_sd.apply_patch(pipe, attention)
    assert "\n" not in str(caught.value)
    assert "'broken'" in str(caught.value)
    assert dict(pipe.unet.attn_processors) == before


def test_what_raises_in_a_step_is_named(pipe: Any) -> None:
    """Also where the small trial did not show it. The package's own keep the contract."""
    late = broken(**attend(lambda tokens, values: fail() if tokens.shape[1] > 100 else values))
    says = r"'broken' .* raises in attend \(ValueError: bad luck\)"
    with pytest.raises(ElfattError, match=says), elfatt_sd.patched(pipe, late()):
        pipe("a b", num_inference_steps=1, output_type="latent")
    assert not elfatt_sd.is_patched(pipe)
    for kind in methods._OWN:
        check(kind())


def test_it_is_a_method_on_the_command_line(module: str, tmp_path: Path) -> None:
    from elfatt_sd.cli.options import build_patch

    chosen = build_patch(method=module, set=["factor=0.5"]).config
    assert (chosen.method, chosen.phases[0].attention.factor) == ("values", 0.5)  # type: ignore[attr-defined]
    chosen.save(tmp_path / "own.json")
    assert PatchConfig.load(tmp_path / "own.json") == chosen


@pytest.mark.parametrize("code", ["raise SystemExit(0)", "def (", "1 / 0", "Mine = 3", "", "os:system", ":"])
def test_modules_that_give_no_class_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    name = f"odd_{abs(hash(code))}"
    (tmp_path / f"{name}.py").write_text("" if ":" in code else code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ElfattError, match=r"package.module:Class|derived from") as raised:
        PatchConfig.preset(code if ":" in code else f"{name}:Mine")  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)
    if code in ("raise SystemExit(0)", "def (", "1 / 0"):
        with pytest.raises(ElfattError, match="cannot be imported"):
            load_own(MetricChoice(f"{name}:mine"))
