"""Attentions of somebody else's: what is refused, and that one works everywhere without touching the package."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import elfatt_sd
from elfatt_sd import ElfattError, PatchConfig, Phase, methods
from elfatt_sd.evaluation.metrics.base import MetricChoice, load_own
from elfatt_sd.methods import Attention
from elfatt_sd.methods.conformance import check


@dataclass(frozen=True)
class Near(Attention):
    """Every token sees itself and its values, smoothed."""

    name: ClassVar[str] = "near"
    strength: float = 0.5

    def attend(self, layer: Any, tokens: torch.Tensor, prepared: Any) -> torch.Tensor:
        return layer.project(tokens)[2] * self.strength

    def cost(self, size: Any) -> float:
        return size.projections(size.tokens, size.tokens)


class Broken(Near):
    """A base for what breaks one rule; its name is known to the checks of settings."""


def broken(**members: Any) -> Any:
    own = {"name": "broken", "__module__": __name__, "__qualname__": "Broken", **members}
    annotations = own.pop("__annotations__", {})
    return dataclass(frozen=True)(type("Broken", (Near,), {**own, "__annotations__": annotations}))


@pytest.fixture(autouse=True)
def only_for_this_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(methods, "_known", dict(methods._known))
    yield


def test_a_registered_attention_is_a_method() -> None:
    elfatt_sd.register(Near)
    config = PatchConfig.preset("near", strength=0.25)  # type: ignore[arg-type,call-arg]
    assert config.phases == (Phase(1.0, Near(0.25)),)
    assert PatchConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.without_effect(["strength", "agents"]) == ["agents"]
    assert str(config.phases[0].attention) == "near (strength 0.25)"


def test_it_runs_in_a_pipeline_and_is_taken_back(pipe: Any) -> None:
    elfatt_sd.register(Near)
    before = dict(pipe.unet.attn_processors)
    plan = elfatt_sd.plan(pipe, Near())
    assert "near (strength 0.5)" in str(plan)
    assert 0 < plan.multiply_adds_after < plan.multiply_adds_before
    with elfatt_sd.patched(pipe, Near(), autotune=True):
        pipe("a b", num_inference_steps=2, output_type="latent")
    assert dict(pipe.unet.attn_processors) == before


def test_the_same_class_may_be_registered_again() -> None:
    assert elfatt_sd.register(Near) is Near
    assert elfatt_sd.register(Near) is Near


@dataclass(frozen=True)
class NoName(Attention):
    def attend(self, layer: Any, tokens: torch.Tensor, prepared: Any) -> torch.Tensor:
        return tokens

    def cost(self, size: Any) -> float:
        return 1.0


@dataclass(frozen=True)
class Taken(Near):
    name: ClassVar[str] = "sampled"


class NotFrozen(Near):
    name: ClassVar[str] = "thawed"


@dataclass(frozen=True)
class Unsaved(Near):
    name: ClassVar[str] = "unsaved"
    what: Any = field(default_factory=lambda: {1, 2})


@dataclass(frozen=True)
class AsAPreset(Near):
    name: ClassVar[str] = "tome"


@dataclass(frozen=True)
class AlmostAPreset(Near):
    name: ClassVar[str] = "ELFATT_Fast"


@dataclass(frozen=True)
class AlmostTaken(Near):
    name: ClassVar[str] = "Cell-Spread"


@dataclass(frozen=True)
class Endless(Near):
    name: ClassVar[str] = "endless"
    what: float = math.inf


@dataclass(frozen=True)
class Changing(Near):
    name: ClassVar[str] = "changing"
    what: Any = field(default_factory=list)


@dataclass(frozen=True)
class FailingDefault(Near):
    name: ClassVar[str] = "failing_default"
    what: Any = field(default_factory=lambda: 1 / 0)


@dataclass(frozen=True)
class Ambiguous(Near):
    name: ClassVar[str] = "ambiguous"
    seed: int = 0


@dataclass(frozen=True)
class NoAttend(Attention):
    name: ClassVar[str] = "no_attend"

    def cost(self, size: Any) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        (NoName, "give a `name`"),
        (Taken, "'sampled' is taken by elfatt_sd.methods.sampled:Sampled"),
        (AsAPreset, "'tome' is taken by the method 'tome'"),
        (AlmostAPreset, "'ELFATT_Fast' is taken by the method 'elfatt-fast'"),
        (AlmostTaken, "'Cell-Spread' is taken by elfatt_sd.methods.sampled:CellSpread"),
        (Endless, "'what' is not one that JSON can hold"),
        (Changing, "'what' is not one that JSON can hold"),
        (FailingDefault, "'what' is not one that JSON can hold"),
        (NotFrozen, "not a frozen dataclass"),
        (Unsaved, "'what' is not one that JSON can hold"),
        (Ambiguous, "'seed' means something else"),
        (NoAttend, "no method attend"),
        (3, "give a class derived from"),
        (dict, "give a class derived from"),
    ],
)
def test_what_is_declared_wrongly_is_refused_in_one_line(kind: Any, rule: str) -> None:
    with pytest.raises(ElfattError, match=rule) as caught:
        elfatt_sd.register(kind)
    assert "\n" not in str(caught.value)
    assert set(methods._known) == {kind.name for kind in methods._OWN}


def _raise(*_: Any) -> Any:
    raise ValueError("bad\nluck")


def _moves_tokens(self: Any, layer: Any, tokens: torch.Tensor, prepared: Any) -> torch.Tensor:
    tokens.mul_(2)
    return layer.project(tokens)[2]  # type: ignore[no-any-return]


def _overflows(self: Any, layer: Any, tokens: torch.Tensor, prepared: Any) -> torch.Tensor:
    return layer.project(tokens)[2] * math.inf  # type: ignore[no-any-return]


def _reads(self: Any, layer: Any, tokens: torch.Tensor, prepared: Any) -> torch.Tensor:
    value = layer.project(tokens)[2]
    return value if float(value.sum()) > 0 else -value  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("members", "rule"),
    [
        ({"attend": lambda self, layer, tokens, prepared: tokens}, r"returns shape \[2, 64, 16\]"),
        ({"attend": lambda self, layer, tokens, prepared: layer.project(tokens)[2].double()}, "returns torch.float64"),
        ({"attend": lambda self, layer, tokens, prepared: None}, "returns NoneType"),
        ({"attend": lambda self, layer, tokens, prepared: torch.rand(2, tokens.shape[1], 2, 8)}, "global random state"),
        ({"attend": _raise}, r"raises in attend \(ValueError: bad luck\)"),
        ({"prepare": _raise}, "raises in prepare"),
        ({"cost": lambda self, size: -1}, "has cost -1"),
        ({"cost": lambda self, size: math.inf}, "has cost inf"),
        ({"prepare": lambda self, grid, draws: 5}, "prepares int"),
        ({"words": lambda self, fitted: 3}, "says itself as 3"),
        ({"words": _raise}, "raises in words"),
        ({"prepare": lambda self, grid, draws: random.random() and None}, "global random state"),
        ({"prepare": lambda self, grid, draws: np.random.rand(1) and None}, "global random state"),
        ({"attend": _overflows}, "not finite"),
        ({"attend": _moves_tokens}, "changes the tokens"),
        ({"attend": _reads}, "reads values of tensors on the host"),
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
    """Also where the small trial did not show it."""

    def late(self: Any, layer: Any, tokens: torch.Tensor, prepared: Any) -> torch.Tensor:
        if tokens.shape[1] > 100:
            raise ValueError("too many")
        return layer.project(tokens)[2]  # type: ignore[no-any-return]

    with (
        pytest.raises(ElfattError, match=r"'broken' .* raises in attend \(ValueError: too many\)"),
        elfatt_sd.patched(pipe, broken(attend=late)()),
    ):
        pipe("a b", num_inference_steps=1, output_type="latent")
    assert not elfatt_sd.is_patched(pipe)


def test_the_packages_own_keep_the_contract() -> None:
    for kind in methods._OWN:
        check(kind())


def test_a_class_can_be_named_by_its_module(module: str) -> None:
    assert PatchConfig.preset(module).method == "values"  # type: ignore[arg-type]
    for name in ("no_such_module:Near", "someones_own:Nothing", "os:system", ":"):
        with pytest.raises(ElfattError, match=r"package.module:Class|derived from") as caught:
            PatchConfig.preset(name)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)


def test_it_gets_a_row_in_a_bench(module: str, pipe: Any) -> None:
    from elfatt_sd.benchmarking import unet
    from elfatt_sd.benchmarking.models import Model
    from elfatt_sd.cli.bench import read_method

    chosen = [read_method(f"{module}:factor=0.5"), read_method(module)]
    model = Model(pipe.unet, pipe.vae_scale_factor)
    rows = unet(model, sizes=(32,), methods=chosen, repeats=1, memory=(), device="cpu")["rows"]
    assert {"untouched", "values:factor=0.5", "values"} <= {row["method"] for row in rows}


def test_it_is_a_method_on_the_command_line(module: str, tmp_path: Path) -> None:
    from elfatt_sd.cli.options import Patch

    chosen = Patch(method=module, set=["factor=0.5"])
    assert chosen.config.phases[0].attention.factor == 0.5  # type: ignore[attr-defined]
    chosen.config.save(tmp_path / "own.json")
    assert PatchConfig.load(tmp_path / "own.json") == chosen.config


@dataclass(frozen=True)
class Picky(Near):
    """A class that checks its own settings, in its own way."""

    name: ClassVar[str] = "picky"

    def __post_init__(self) -> None:
        if self.strength < 0:
            raise ValueError("strength is\nnegative")


def test_what_an_author_refuses_is_one_line() -> None:
    elfatt_sd.register(Picky)
    with pytest.raises(
        ElfattError, match=r"^attention 'picky' does not accept strength=-1 \(ValueError: .* negative\)"
    ):
        PatchConfig.preset("picky", strength=-1)  # type: ignore[arg-type,call-arg]


def test_a_class_that_refuses_its_own_defaults_is_refused() -> None:
    @dataclass(frozen=True)
    class Never(Picky):
        name: ClassVar[str] = "never"
        strength: float = -1.0

    with pytest.raises(ElfattError, match="attention 'never' does not accept its defaults"):
        elfatt_sd.register(Never)


@pytest.mark.parametrize("code", ["raise SystemExit(0)", "def (", "1 / 0", "Mine = 3"])
def test_modules_that_do_not_give_a_class_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    name = f"odd_{abs(hash(code))}"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ElfattError, match=f"{name}:Mine|a class") as raised:
        methods.attention_named(f"{name}:Mine")
    assert "\n" not in str(raised.value)
    if code != "Mine = 3":
        with pytest.raises(ElfattError, match="cannot be imported"):
            load_own(MetricChoice(f"{name}:mine"))
