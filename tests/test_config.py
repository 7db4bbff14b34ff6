"""Configurations: presets, validation, round trips."""

from __future__ import annotations

import json
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elfatt_sd import config as module
from elfatt_sd.config import (
    EXACT,
    METHODS,
    PRESETS,
    LayerPhases,
    PatchConfig,
    Phase,
    Settings,
    known_method,
    setting_names,
)
from elfatt_sd.errors import ElfattError
from elfatt_sd.methods import Merge, attentions, is_own
from elfatt_sd.phases import DENSE, Narrower


def shape(config: PatchConfig) -> list[tuple[float, str, float, int]]:
    return [(phase.until, phase.attention.name, phase.ratio, phase.stride) for phase in config.phases]


def test_presets_are_the_published_methods() -> None:
    assert shape(PatchConfig.preset("sd")) == []
    assert shape(PatchConfig.preset("tome")) == [(1.0, "softmax", 0.5, 2)]
    assert shape(PatchConfig.preset("agent")) == [(0.4, "agent", 0.4, 4), (1.0, "softmax", 0.4, 2)]
    assert shape(PatchConfig.preset("elfatt")) == [(0.2, "elfatt", 0.5, 2), (1.0, "softmax", 0.5, 2)]
    agent = PatchConfig.preset("agent").phases[0]
    assert (agent.agent_source, agent.agent_ratio, agent.agent_scale, agent.value_shortcut) == (
        "merged",
        0.95,
        0.3,
        0.075,
    )


def test_settings_reach_every_phase_that_is_not_exact() -> None:
    config = PatchConfig.preset("elfatt", ratio=0.25, stride=4, block_size=81, agents=16, block_order="curve")
    assert [(phase.ratio, phase.stride) for phase in config.phases] == [(0.25, 4)] * 2
    assert (config.phases[0].block_size, config.phases[0].agents, config.phases[0].block_order) == (81, 16, "curve")
    fast = PatchConfig.preset("elfatt-fast", block_size=512)
    assert fast.phases[0].exact
    assert fast.phases[1].block_size == 512


@pytest.mark.parametrize(
    ("method", "fraction", "expected"),
    [
        ("elfatt", 0.0, [(1.0, "softmax")]),
        ("elfatt", 0.4, [(0.4, "elfatt"), (1.0, "softmax")]),
        ("elfatt", 1.0, [(1.0, "elfatt")]),
        ("tome", 0.5, [(0.5, "softmax")]),
        ("tome", 0.0, []),
        ("elfatt-fast", 0.5, [(0.5, "softmax"), (1.0, "sampled")]),
        ("elfatt-fast", 1.0, [(1.0, "sampled")]),
        ("elfatt-fast", 0.0, [(1.0, "softmax")]),
    ],
)
def test_active_fraction(method: str, fraction: float, expected: list[tuple[float, str]]) -> None:
    config = PatchConfig.preset(method, active_fraction=fraction)
    assert [(phase.until, phase.attention.name) for phase in config.phases] == expected


def test_phase_at_covers_the_run() -> None:
    config = PatchConfig.preset("elfatt")
    names = [
        config.phase_at(step, steps).attention.name for step, steps in ((0, 50), (9, 50), (10, 50), (49, 50), (0, 1))
    ]
    assert names == ["elfatt", "elfatt", "softmax", "softmax", "elfatt"]
    assert PatchConfig.preset("tome", active_fraction=0.5).phase_at(25, 50) == EXACT


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        *(({"ratio": value}, f"ratio={value!r}") for value in (1.0, -0.1, float("nan"), "half", True)),
        ({"stride": 1}, "stride=1"),
        ({"stride": 2.0}, "stride=2.0"),
        ({"block_size": 0}, "block_size=0"),
        ({"agents": 0}, "agents=0"),
        ({"active_fraction": 1.5}, "active_fraction=1.5"),
        ({"block_order": "spiral"}, "block_order='spiral'"),
        ({"second_order": "spiral"}, "second_order='spiral'"),
        ({"agent_source": "x"}, "agent_source='x'"),
        ({"split": "x"}, "split='x'"),
        ({"max_downsample": 3}, "max_downsample=3"),
        ({"levels": 0}, "levels=0"),
        ({"seed": -1}, "seed=-1"),
        ({"use_rand": 1}, "use_rand=1"),
        ({"reuse_steps": 0}, "reuse_steps=0"),
        ({"residual_steps": 0}, "residual_steps=0"),
        ({"attention_backend": "warp"}, "attention_backend='warp'"),
        ({"ration": 0.5}, "'ration'"),
        ({"until": 0.5}, "'until'"),
    ],
)
@pytest.mark.parametrize("method", ["sd", "elfatt"])
def test_bad_settings_are_named(method: str, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ElfattError) as caught:
        PatchConfig.preset(method, **settings)
    message = str(caught.value)
    assert named in message
    assert "accepted" in message or "give" in message
    assert "\n" not in message


def test_what_is_exact_in_every_phase_is_not_active() -> None:
    assert PatchConfig.preset("tome").active
    assert not PatchConfig.preset("tome", ratio=0).active
    assert not PatchConfig.preset("elfatt-fast", active_fraction=0.0).active
    assert PatchConfig.preset("tome", ratio=0, attention_backend="native").active


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Phase(1.0, "cell_spread", ratio=0.5), "ratio=0.5 is not accepted with attention='cell_spread'; give"),
        (lambda: Phase(1.0, "sampled", ratio=0.5), "ratio=0.5 is not accepted with attention='sampled'; give ratio=0"),
        (
            lambda: Phase(1.0, "block", ratio=0.5, second_order="spread"),
            "ratio=0.5 is not accepted with a second_order",
        ),
        (
            lambda: PatchConfig("x", (Phase(1.0, "cell_spread"),), attention_backend="flash"),
            "attention_backend='flash' is not accepted with attention='cell_spread', which needs log-sum-exps",
        ),
        (lambda: PatchConfig("x", (DENSE["float16"],), fp32_logits=True), "not accepted with fp32_logits=True"),
        *(
            (lambda value=value: Phase(attention_dtype=value), f"attention_dtype={value!r} is not known; accepted: bfl")
            for value in ("float32", "", 16, True)
        ),
        (lambda: Phase(1.0, "reuse"), "give the number of steps that share one output"),
        (lambda: Phase(residual_guidance="yes"), "residual_guidance='yes' is not accepted"),  # type: ignore[arg-type]
        (lambda: LayerPhases("a", (EXACT, EXACT)), "each must end later"),
        (lambda: PatchConfig.from_dict({"per_layer": [{"layer": "a"}]}), "accepted: layers, phases"),
        (lambda: PatchConfig.from_dict({"per_layer": "a"}), "give a list of objects"),
        (lambda: PatchConfig.preset("elfatt-fast", ratio=0.5), "does not merge tokens; leave ratio away, or take"),
        *((lambda name=name: known_method(name), f"method={name!r} is not known") for name in ("", None, 3)),
        (lambda: Phase(0), "until=0"),
        (lambda: PatchConfig("x", (Phase(0.5), Phase(0.5))), "later"),
        (lambda: PatchConfig.preset("flash"), "accepted: sd, tome, agent, elfatt"),
        (lambda: PatchConfig.preset(["elfatt"]), "method=['elfatt'] is not known"),  # type: ignore[arg-type]
        (lambda: PatchConfig.from_dict({"phase": []}), "key 'phase' is not known"),
        (lambda: PatchConfig.from_dict({"phases": [{"size": 3}]}), "key 'phase.size' is not known"),
        (lambda: PatchConfig.from_dict({"phases": [3]}), "phases="),
    ],
)
def test_what_does_not_fit_is_one_line(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ElfattError) as caught:
        make()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_settings_have_the_names_and_types_of_the_fields() -> None:
    """`Settings` is written out for type checkers, and must say what the fields say."""
    own = [kind for kind in attentions().values() if is_own(kind)]
    own_fields = ("method", "phases", "per_layer", "changes")
    of_phases = [hint for kind in (Merge, *own) for hint in typing.get_type_hints(kind).items()]
    fields = {
        **{name: kind for name, kind in of_phases if typing.get_origin(kind) is not typing.ClassVar},
        "residual_steps": int,
        "residual_guidance": bool,
        "attention_dtype": Narrower | None,
        **{name: kind for name, kind in typing.get_type_hints(PatchConfig).items() if name not in own_fields},
        "active_fraction": float,
    }
    assert typing.get_type_hints(Settings) == fields
    assert set(fields) == set(setting_names())
    assert Settings.__required_keys__ == frozenset()


def test_the_methods_that_type_checkers_know_are_the_presets() -> None:
    assert tuple(PRESETS) == METHODS == tuple(known_method(str(name)) for name in METHODS)
    assert all(name == config.method for name, config in PRESETS.items())


SAVED = [
    *(PatchConfig.preset(name, stride=3, block_size=56, active_fraction=0.5, seed=2**63 - 1) for name in METHODS),
    PatchConfig("own", (Phase(0.5, "block"),), per_layer=(LayerPhases("a.*", (EXACT,)), LayerPhases("b"))),
    PatchConfig("own", (Phase(1.0, "sampled", residual_steps=2, residual_guidance=True, attention_dtype="bfloat16"),)),
]


@pytest.mark.parametrize("config", SAVED, ids=lambda config: config.method)
def test_a_saved_configuration_is_loaded_again(config: PatchConfig, tmp_path: Path) -> None:
    for path in (tmp_path / "new" / "folder" / "c.json", str(tmp_path / "c.json")):
        config.save(path)
        assert PatchConfig.load(path) == PatchConfig.load(Path(path)) == config
        assert hash(PatchConfig.load(path)) == hash(config)
    (tmp_path / "c.json").write_text(json.dumps(config.to_dict()), encoding="utf-8-sig")  # as editors mark it
    assert PatchConfig.load(tmp_path / "c.json") == config


def test_files_and_hashes_of_earlier_versions_stay_as_they_are() -> None:
    said = str(PatchConfig.preset("elfatt-quality").to_dict())
    assert not any(name in said for name in ("per_layer", "residual_guidance", "attention_dtype"))


def test_settings_reach_the_phases_of_layers_too() -> None:
    config = SAVED[-2].with_settings(block_size=32)
    assert [phase.block_size for phase in config.all_phases if not phase.exact] == [32]
    own = PatchConfig("own", (Phase(0.5, "block"),), per_layer=(LayerPhases("a.*", (Phase(1.0, "sampled"),)),))
    assert own.with_settings(keys=4).for_layer("a.1").phases[0].keys == 4
    assert own.stretches == (0.5, 1.0)
    assert [[phase.attention.name for phase in own.at(step, 4).all_phases] for step in (0, 3)] == [
        ["block", "sampled"],
        ["sampled"],
    ]
    quality = PatchConfig.preset("elfatt-fast", attention_dtype="float16")
    assert [phase.attention_dtype for phase in quality.phases] == [None, "float16"], "exact steps stay exact"


def test_saving_replaces_the_whole_file_or_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "c.json"
    before, after = PatchConfig.preset("elfatt"), PatchConfig("ünïcode")
    before.save(path)
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(ElfattError, match=r"c\.json' cannot be written \(No space left on device\)"):
            after.save(path)
    assert PatchConfig.load(path) == before
    assert list(tmp_path.iterdir()) == [path]
    after.save(path)
    assert PatchConfig.load(path) == after


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            b"{",
            "is not JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)); give a file",
        ),
        (b"", "is not JSON"),
        (b"\xff\xfe{}", "cannot be read ('utf-8' codec"),
        (b"[]", "is not accepted: list is not a configuration; give"),
        (b"3", "is not accepted: int is not a configuration; give"),
        (b"null", "is not accepted: NoneType is not a configuration; give"),
        (b'{"colour": 1}', "is not accepted: key 'colour' is not known; accepted: method, phases"),
        (b'{"phases": [{"size": 3}]}', "is not accepted: key 'phase.size' is not known; accepted: until"),
        (b'{"phases": {"until": 1}}', "is not accepted: phases={'until': 1}"),
        (b'{"phases": [{"ratio": NaN}]}', "is not accepted: ratio=nan"),
        (b'{"seed": 1.5}', "is not accepted: seed=1.5"),
        (b"[" * 100_000, "cannot be read"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(content)
    with pytest.raises(ElfattError) as caught:
        PatchConfig.load(path)
    assert str(caught.value).startswith(f"config={str(path)!r} {says}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "what"), [(PatchConfig().save, "written"), (PatchConfig.load, "read")], ids=["save", "load"]
)
def test_a_file_that_cannot_be_written_or_read_names_its_path(call: Any, what: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    bad: list[Any] = [tmp_path, tmp_path / "file" / "c.json", tmp_path / ("x" * 300), "nul\0.json", 3]
    for path in bad:
        with pytest.raises(ElfattError, match=rf"^config=.* cannot be {what} \(.+\); give ") as caught:
            call(path)
        assert "\n" not in str(caught.value)
        assert repr(str(path) if isinstance(path, Path) else path) in str(caught.value)


@pytest.mark.parametrize(
    ("method", "settings", "idle"),
    [
        ("tome", {"agents": 7, "ratio": 0.4, "block_size": 64, "seed": 3}, ["agents", "block_size"]),
        ("sd", {"ratio": 0.3, "active_fraction": 0.5, "seed": 1}, ["ratio"]),
        ("sd", {"attention_backend": "native"}, []),
        ("elfatt", {"agents": 7, "block_size": 64, "groups": 2, "agent_ratio": 0.9}, ["groups", "agent_ratio"]),
        ("agent", {"agents": 7, "agent_ratio": 0.9, "split": "heads"}, ["agents", "split"]),
        ("elfatt-fast", {"block_size": 64, "stride": 3, "use_rand": False}, ["stride"]),
        ("tome", {"residual_steps": 2, "residuals": "fp8"}, []),
    ],
)
def test_settings_that_a_method_has_not_are_found(method: str, settings: dict[str, Any], idle: list[str]) -> None:
    assert PatchConfig.preset(method, **settings).without_effect(settings) == idle
