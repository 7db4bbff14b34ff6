"""Decisions of autotuning: for what they hold, and how they are kept."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor, SlicedAttnProcessor
from support.checks import SAMPLE, state_of

import elfatt_sd
from elfatt_sd.config import PatchConfig, Phase
from elfatt_sd.runtime import autotune
from elfatt_sd.runtime.autotune import Decision, Decisions, decision_key

pytestmark = pytest.mark.usefixtures("own_cache")


KEY_CHANGES: dict[str, Any] = {
    "another processor": lambda monkeypatch: monkeypatch.setattr(autotune, "device_name", lambda _: "another"),
    "more threads": lambda monkeypatch: monkeypatch.setattr(torch, "get_num_threads", lambda: 99),
    "torch": lambda monkeypatch: monkeypatch.setattr(torch, "__version__", "99"),
    "diffusers": lambda monkeypatch: monkeypatch.setattr(diffusers, "__version__", "99"),
    "elfatt-sd": lambda monkeypatch: monkeypatch.setattr(elfatt_sd, "__version__", "99"),
}


STATE_CHANGES: dict[str, Any] = {
    "processor's class": lambda state: setattr(state.patched, "original", AttnProcessor()),
    "slices": lambda state: setattr(state.patched, "original", SlicedAttnProcessor(1)),
    "fused projections": lambda state: setattr(state.patched, "fused", True),
    "heads": lambda state: setattr(state.layer.attention, "heads", 4),
    "channels": lambda state: setattr(state.layer.attention, "inner_dim", 32),
    "grid": lambda state: setattr(state, "grid", (8, 32)),
    "layout": lambda state: setattr(state.patched, "layer", dataclasses.replace(state.layer, channels_first=False)),
}


CONFIG_CHANGES: dict[str, Any] = {
    "attention_backend": "native",
    "fp32_logits": True,
    "reuse_steps": 2,
    "reuse_layers": True,
    "use_rand": False,
}


PHASE_CHANGES: dict[str, Any] = {
    "attention": "block",
    "ratio": 0.25,
    "stride": 4,
    "block_size": 32,
    "block_order": "spread",
    "agents": 8,
    "agent_share": 0.25,
    "split": "channels",
    "value_shortcut": 0.1,
}


PHASE = Phase(1.0, "elfatt", ratio=0.5, block_size=16)


def key(pipe: Any, phase: Phase = PHASE, sample: torch.Tensor = SAMPLE, change: Any = None, **settings: Any) -> str:
    """The key of a decision on a layer of its own, which `change` may change."""
    state = state_of(pipe, PatchConfig("x", (phase,), **settings))
    state.patched.layer = dataclasses.replace(state.layer, attention=copy.deepcopy(state.layer.attention))
    state.patched.denoiser.layers.append(copy.copy(state.patched))
    if change is not None:
        change(state)
    return decision_key(state, phase, sample)


@pytest.mark.parametrize("change", KEY_CHANGES.values(), ids=KEY_CHANGES.keys())
def test_a_decision_holds_for_one_machine(pipe: Any, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(pipe)
    assert key(pipe) == before
    change(monkeypatch)
    assert key(pipe) != before


@pytest.mark.parametrize("change", STATE_CHANGES.values(), ids=STATE_CHANGES.keys())
def test_a_decision_holds_for_one_layer(pipe: Any, change: Any) -> None:
    assert key(pipe, change=change) != key(pipe)


@pytest.mark.parametrize("name", CONFIG_CHANGES)
def test_a_decision_holds_for_one_configuration(pipe: Any, name: str) -> None:
    assert key(pipe, **{name: CONFIG_CHANGES[name]}) != key(pipe)
    assert key(pipe, seed=7) == key(pipe)


@pytest.mark.parametrize("name", PHASE_CHANGES)
def test_a_decision_holds_for_one_phase(pipe: Any, name: str) -> None:
    assert key(pipe, dataclasses.replace(PHASE, **{name: PHASE_CHANGES[name]})) != key(pipe)
    assert key(pipe, dataclasses.replace(PHASE, until=0.5)) == key(pipe)


def test_a_decision_holds_for_one_input(pipe: Any) -> None:
    keys = [key(pipe), key(pipe, sample=SAMPLE.half()), key(pipe, sample=SAMPLE[:1])]
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            keys.append(key(pipe))
    assert len(set(keys)) == 5


@pytest.mark.parametrize("content", ["", "[]", '{"a": {"b": 1}}', "\x00"])
def test_a_damaged_file_counts_as_empty(tmp_path: Path, content: str) -> None:
    path = tmp_path / "autotune.json"
    path.write_text(content)
    decisions = Decisions(path)
    assert decisions.get("a") is None
    decisions.put("a", Decision(0.5, 0.4, 0.6))
    assert Decisions(path).get("a") == Decision(0.5, 0.4, 0.6)


def test_processes_that_share_a_file_keep_each_others_decisions(tmp_path: Path) -> None:
    path, decision = tmp_path / "autotune.json", Decision(0.5, 0.4, 0.6)
    first, second = Decisions(path), Decisions(path)
    assert first.get("a") is second.get("a") is None
    first.put("a", decision)
    second.put("b", decision)
    first.put("c", decision)
    assert sorted(json.loads(path.read_text())) == ["a", "b", "c"]
    assert first.get("b") == second.get("c") == decision


def test_a_folder_that_cannot_be_written_costs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    decisions = Decisions(tmp_path / "file" / "autotune.json")
    decisions.put("a", Decision(0.5, 0.4, 0.6))
    assert decisions.get("a") == Decision(0.5, 0.4, 0.6)
