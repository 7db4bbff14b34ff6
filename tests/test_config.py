"""Configurations: settings, validation, round trips."""

from __future__ import annotations

import dataclasses
import functools
import json
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from support.commands import ROOT

from elfatt_sd.config import (
    EXACT,
    METHODS,
    PRESETS,
    LayerPhases,
    PatchConfig,
    Phase,
    Settings,
    known_method,
    method_named,
)
from elfatt_sd.errors import ElfattError, ElfattFailure
from elfatt_sd.methods import Merge, attentions, is_own
from elfatt_sd.phases import DENSE, Narrower, setting_names


def test_settings_reach_every_phase_that_is_not_exact() -> None:
    """Those of layers too."""
    config = PatchConfig.preset("elfatt", ratio=0.25, stride=4, block_size=81, agents=16, block_order="curve")
    assert [(phase.ratio, phase.stride) for phase in config.phases] == [(0.25, 4)] * 2
    assert (config.phases[0].block_size, config.phases[0].agents, config.phases[0].block_order) == (81, 16, "curve")
    fast = PatchConfig.preset("elfatt-fast", block_size=512, attention_dtype="float16")
    assert [(phase.exact, phase.attention_dtype) for phase in fast.phases] == [(True, None), (False, "float16")]
    assert fast.phases[1].block_size == 512
    own = PatchConfig(
        "own",
        (Phase(0.5, "block"),),
        per_layer=(LayerPhases("a.*", (EXACT,)), LayerPhases("b.*", (Phase(1.0, "sampled"),))),
    )
    assert own.with_settings(keys=4).for_layer("b.1").phases[0].keys == 4
    assert [phase.block_size for phase in own.with_settings(block_size=32).all_phases if not phase.exact] == [32, 32]
    at = [[phase.attention.name for phase in own.at(step, 4).all_phases] for step in (0, 3)]
    assert own.stretches == (0.5, 1.0) and at == [["block", "sampled"], ["sampled"]]


@pytest.mark.parametrize(
    ("method", "fraction", "expected"),
    [
        ("elfatt", 0.0, [(1.0, "softmax")]),
        ("elfatt", 0.4, [(0.4, "elfatt"), (1.0, "softmax")]),
        ("tome", 0.5, [(0.5, "softmax")]),
        ("tome", 0.0, []),
        ("elfatt-fast", 0.5, [(0.5, "softmax"), (1.0, "sampled")]),
        ("elfatt-fast", 1.0, [(1.0, "sampled")]),
        ("elfatt-fast", 0.0, [(1.0, "softmax")]),
    ],
)
def test_active_fraction(method: Any, fraction: float, expected: list[tuple[float, str]]) -> None:
    config = PatchConfig.preset(method, active_fraction=fraction)
    assert [(phase.until, phase.attention.name) for phase in config.phases] == expected
    assert config.active == any(not phase.exact for phase in config.phases)


def test_phases_cover_the_run() -> None:
    """Of 51 calls, two share the second timestep; of 99, almost all."""
    for method, counts in (("elfatt", {50: 10, 51: 11, 99: 20, 1: 1}), ("agent", {50: 20, 51: 21, 99: 40, 1: 1})):
        for steps, count in counts.items():
            names = [PatchConfig.preset(method).phase_at(step, steps).attention.name for step in range(steps)]
            assert names == [method] * count + ["softmax"] * (steps - count)
    assert PatchConfig.preset("tome", active_fraction=0.5).phase_at(25, 50) == EXACT
    assert not PatchConfig.preset("tome", ratio=0).active
    assert PatchConfig.preset("tome", ratio=0, attention_backend="native").active


BAD: list[tuple[dict[str, Any] | Callable[[], object], str]] = [  # more, as the command line says them: its snapshot
    *(({"ratio": value}, f"ratio={value!r}") for value in (1.0, -0.1, float("nan"), "half", True)),
    *(({name: "x"}, f"{name}='x'") for name in ("second_order", "agent_source", "split", "residual_guidance")),
    *(({name: 0}, f"{name}=0") for name in ("levels", "reuse_steps", "residual_steps", "use_rand", "groups")),
    *(({name: 2.5}, f"{name}=2.5") for name in ("stride", "active_fraction", "max_downsample", "seed")),
    ({"until": 0.5}, "'until'"),
    *(({"attention_dtype": value}, f"attention_dtype={value!r} is not known") for value in ("float32", "", 16, True)),
    (lambda: Phase(1.0, "cell_spread", ratio=0.5), "ratio=0.5 is not accepted with attention='cell_spread'"),
    (lambda: Phase(1.0, "block", ratio=0.5, second_order="spread"), "ratio=0.5 is not accepted with a second_order"),
    (lambda: PatchConfig("x", (Phase(1.0, "cell_spread"),), attention_backend="flash"), "backend='flash'"),
    (lambda: PatchConfig("x", (DENSE["float16"],), fp32_logits=True), "not accepted with fp32_logits=True"),
    (lambda: Phase(1.0, "reuse"), "give the number of steps that share one output"),
    (lambda: Phase(0), "until=0"),
    (lambda: PatchConfig.from_dict({"method": 5}), "method=5 is not accepted; give a name"),
    (lambda: LayerPhases("a", (EXACT, EXACT)), "each must end later"),
    (lambda: PatchConfig("x", (Phase(0.5), Phase(0.5))), "later"),
    (lambda: PatchConfig.from_dict({"per_layer": [{"layer": "a"}]}), "accepted: layers, phases"),
    (lambda: PatchConfig.from_dict({"per_layer": "a"}), "give a list of objects"),
    *((lambda name=name: known_method(name), f"method={name!r} is not known") for name in ("", None, 3, ["elfatt"])),
]


@pytest.mark.parametrize(("given", "says"), BAD)
def test_what_does_not_fit_is_one_line_with_a_remedy(given: Any, says: str) -> None:
    """Settings of the untouched model too."""
    makers = [given]
    if isinstance(given, dict):
        makers = [functools.partial(PatchConfig.preset, method, **given) for method in ("sd", "elfatt")]
    for make in makers:
        with pytest.raises(ElfattError) as caught:
            make()
        message = str(caught.value)
        assert says in message and "\n" not in message
        assert any(word in message for word in ("accepted", "give", "must"))


def test_settings_have_the_names_and_types_of_the_fields() -> None:
    """`Settings` and `METHODS` are written out for type checkers, and must say what the fields and presets say."""
    of_phases = [
        hint
        for kind in (Merge, *(kind for kind in attentions().values() if is_own(kind)))
        for hint in typing.get_type_hints(kind).items()
    ]
    of_run = typing.get_type_hints(PatchConfig)
    fields = {
        **{name: kind for name, kind in of_phases if typing.get_origin(kind) is not typing.ClassVar},
        **{"residual_steps": int, "residual_guidance": bool, "attention_dtype": Narrower | None},
        **{name: of_run[name] for name in of_run.keys() - {"method", "phases", "per_layer", "changes", "origin"}},
        "active_fraction": float,
    }
    assert typing.get_type_hints(Settings) == fields and set(fields) == set(setting_names())
    assert Settings.__required_keys__ == frozenset()
    assert tuple(PRESETS) == METHODS == tuple(known_method(str(name)) for name in METHODS)
    assert all(name == config.method for name, config in PRESETS.items())


SAVED = [
    *(PatchConfig.preset(name, stride=3, block_size=56, active_fraction=0.5, seed=2**63 - 1) for name in METHODS),
    PatchConfig("own", (Phase(0.5, "block"),), per_layer=(LayerPhases("a.*", (EXACT,)), LayerPhases("b"))),
    PatchConfig("ö", (Phase(1.0, "sampled", residual_steps=2, residual_guidance=True, attention_dtype="bfloat16"),)),
]


@pytest.mark.parametrize("config", SAVED, ids=lambda config: config.method)
def test_a_saved_configuration_is_loaded_again(config: PatchConfig, tmp_path: Path) -> None:
    for path in (tmp_path / "new" / "folder" / "c.json", str(tmp_path / "c.json")):
        config.save(path)
        assert PatchConfig.load(path) == PatchConfig.load(Path(path)) == config
        assert hash(PatchConfig.load(path)) == hash(config)
    (tmp_path / "c.json").write_text(json.dumps(config.to_dict()), encoding="utf-8-sig")  # as editors mark it
    assert PatchConfig.load(tmp_path / "c.json") == config


ORIGIN = {"model": "toy", "steps": 25, "versions": {"elfatt-sd": "0.1.0"}}


def test_settings_keep_their_origin_in_files_alone(tmp_path: Path) -> None:
    """Until one is changed; older files have none. What is hashed or compared does not depend on it."""
    dataclasses.replace(SAVED[-1], origin=ORIGIN).save(tmp_path / "elfatt_sd.json")
    loaded = PatchConfig.load(tmp_path)  # the folder
    assert (loaded.origin, method_named(str(tmp_path)).origin) == (ORIGIN, ORIGIN)
    assert loaded == SAVED[-1] and hash(loaded) == hash(SAVED[-1]) and loaded.to_dict() == SAVED[-1].to_dict()
    assert (loaded.with_settings().origin, loaded.with_settings(seed=1).origin) == (ORIGIN, {})
    published = [*(ROOT / "eval" / "tuned").glob("*.json")]
    written = [json.loads(path.read_text(encoding="utf-8")) for path in published]
    assert written and [PatchConfig.load(path).origin for path in published] == [each.pop("origin") for each in written]
    assert PatchConfig.from_dict(written[0]).origin == {}, "older files have none"


def missing(name: str, cause: Exception | None = None) -> Exception:
    """An error of the hub's library, whose classes take other things in other versions."""
    error: Exception = type(name, (FileNotFoundError,), {})("gone\nas the hub says")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("given", "failed", "says"),
    [
        (
            missing("EntryNotFoundError"),
            ElfattError,
            "no settings (elfatt_sd.json) of that name are on the hub: gone as",
        ),
        (missing("EntryNotFoundError", ConnectionError()), ElfattFailure, "and the hub cannot be reached: gone as the"),
        ('{"format": 2, "news": 1}', ElfattError, "format=2 is not 1; a larger one needs a later version of elfatt-sd"),
        ('{"origin": 5}', ElfattError, "origin=5 is not accepted; give an object"),
        (PatchConfig.preset("tome"), None, ""),
    ],
)
def test_settings_come_from_the_hub(given: Any, failed: Any, says: str, tmp_path: Path, monkeypatch: Any) -> None:
    def download(repository: str, file: str) -> str:
        assert (repository, file) == ("owner/name", "elfatt_sd.json")
        if isinstance(given, Exception):
            raise given
        (tmp_path / file).write_text(given if isinstance(given, str) else json.dumps(given.to_dict()))
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    if failed is None:
        assert method_named("owner/name") == PatchConfig.load("owner/name") == given
        return
    with pytest.raises(ElfattError) as caught:
        method_named("owner/name")
    message = str(caught.value)
    assert type(caught.value) is failed and message.startswith("settings 'owner/name' ")
    assert says in message and "\n" not in message


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xff\xfe{}", "are not JSON ('utf-8' codec"),
        (b"[" * 100_000, "cannot be read"),
        (b'{"phases": [{"size": 3}]}', "are not accepted: key 'phase.size' is not known; accepted: until"),
        (b'{"phases": {"until": 1}}', "are not accepted: phases={'until': 1}"),
        (b'{"phases": [{"ratio": NaN}]}', "are not accepted: ratio=nan"),
        (b'{"seed": 1.5}', "are not accepted: seed=1.5"),
        (None, "cannot be read ("),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, content: bytes | None, says: str) -> None:
    """It is named, and so is one that cannot be written."""
    path = tmp_path / "c.json"
    if content is None:
        path.mkdir()
        with pytest.raises(OSError, match=r"c\.json"):
            PatchConfig().save(path)
    else:
        path.write_bytes(content)
    with pytest.raises(ElfattError) as caught:
        PatchConfig.load(path)
    assert str(caught.value).startswith(f"settings {str(path)!r} {says}") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("method", "settings", "idle"),
    [
        ("tome", {"agents": 7, "ratio": 0.4, "block_size": 64, "seed": 3}, ["agents", "block_size"]),
        ("sd", {"ratio": 0.3, "active_fraction": 0.5, "seed": 1}, ["ratio"]),
        ("sd", {"attention_backend": "native"}, []),
        ("elfatt", {"agents": 7, "block_size": 64, "groups": 2}, ["groups"]),
        ("agent", {"agents": 7, "agent_ratio": 0.9, "split": "heads"}, ["split"]),
        ("elfatt-fast", {"block_size": 64, "stride": 3, "use_rand": False}, ["stride"]),
        ("tome", {"residual_steps": 2, "residuals": "fp8"}, []),
    ],
)
def test_settings_that_a_method_has_not_are_found(method: Any, settings: Any, idle: list[str]) -> None:
    assert PatchConfig.preset(method, **settings).without_effect(settings) == idle
    rounded = PatchConfig("own", (DENSE["bfloat16"],)).with_settings(residual_steps=4)
    assert rounded.without_effect(["residual_steps"]) == ["residual_steps"]
