"""Layers that a method does not make faster are left alone; what a decision holds for, and how it is kept."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import diffusers
import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor, SlicedAttnProcessor
from support import tiny_pipelines as tiny
from support.checks import SAMPLE, counting, runner, state_of

import elfatt_sd
from elfatt_sd.config import PatchConfig, Phase
from elfatt_sd.families import find_layers
from elfatt_sd.methods import Draws
from elfatt_sd.runtime import autotune
from elfatt_sd.runtime import call as layer_state
from elfatt_sd.runtime.autotune import Decision, Tuner, decision_key, keep_decision, read_decisions

pytestmark = pytest.mark.usefixtures("own_cache")
BLOCKS = PatchConfig("x", (Phase(1.0, "block", block_size=16),))
PAYS = Decision(0.5, 0.4, 0.6)
CPU = torch.device("cpu")


def test_a_shape_too_small_to_pay_is_left_alone_and_a_large_one_is_patched(pipe: Any, own_cache: Path) -> None:
    """Merging 64 tokens and attending in 16 blocks costs more than all of them; 4096 in blocks of 64 cost less."""
    small = PatchConfig("small", (Phase(1.0, "elfatt", ratio=0.5, block_size=2, block_order="spread"),))
    large = PatchConfig("large", (Phase(1.0, "block", block_size=64),))
    untouched = runner(pipe, height=16, width=16)()
    elfatt_sd.apply_patch(pipe, small, autotune=True)
    assert torch.equal(runner(pipe, height=16, width=16)(), untouched)
    [(known, decision)] = json.loads((own_cache / "autotune.json").read_text()).items()  # the layers have one shape
    assert decision["ratio"] > 1 and "2x8x8x16, 2 heads, torch.float32" in known
    plan = elfatt_sd.plan(pipe, small, height=16, width=16, autotune=True)
    assert not any(layer.patched for layer in plan.layers) and plan.multiply_adds_after == plan.multiply_adds_before
    assert "left alone: " in plan.layers[0].reason and "of the untouched time, measured here" in plan.layers[0].reason
    elfatt_sd.apply_patch(pipe, small, attention_backend="native", autotune=True)  # which then serves them, as they are
    torch.testing.assert_close(runner(pipe, height=16, width=16)(), untouched, atol=1e-5, rtol=0)
    assert sum(each.patched for each in elfatt_sd.plan(pipe, large, height=128, width=128, autotune=True).layers) == 3


Measure = Callable[..., list[Any]]


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> Measure:
    """Let a function stand in for the measurement; what it decides is kept, that it pays where it returns nothing."""

    def call_all(untouched: Any, approximated: Any, device: torch.device) -> None:
        for function, _ in [(untouched, 1), *approximated]:
            function()

    def stand_in(function: Any = call_all) -> list[Any]:
        made: list[Any] = []
        monkeypatch.setattr(autotune, "measure", lambda *given: made.append(function(*given) or PAYS) or made[-1])
        return made

    return stand_in


def test_each_phase_and_shape_is_measured_once_when_it_is_first_called(pipe: Any, measuring: Measure) -> None:
    """In a block too, whose plan is the estimate: the model's own size may not be the one that is drawn."""
    elfatt_sd.apply_patch(pipe, "elfatt")
    expected, measured = runner(pipe)(), measuring()
    with elfatt_sd.patched(pipe, "elfatt", autotune=True) as plan:
        assert not measured
        assert torch.equal(runner(pipe)(), expected), "measuring leaves no trace in the result"
    elfatt_sd.apply_patch(pipe, "elfatt", autotune=True)  # from the file
    runner(pipe)()
    assert len(measured) == 2
    runner(pipe, guidance_scale=1.0)()  # another batch
    assert len(measured) == 4
    assert "elfatt" in str(plan) and plan.config.method == "elfatt"


@pytest.mark.parametrize(
    ("ratios", "rounds", "decision"),
    [
        ([0.5] * 7, 3, Decision(0.5, 0.5, 0.5)),  # three rounds where all of them agree by a quarter
        ([1.1] * 7, 7, Decision(1.1, 1.1, 1.1)),
        ([0.9, 9.0, *[0.9] * 19], 8, Decision(0.9, 0.9, 0.9)),  # the second smallest and largest bound the median
        ([0.87, 0.12, 9.63] * 7, 21, Decision(0.87, 0.12, 9.63)),
    ],
)
def test_rounds_needed(ratios: list[float], rounds: int, decision: Decision, monkeypatch: pytest.MonkeyPatch) -> None:
    """After two that warm up. Each function counts by its share."""
    pairs = iter([9.0] * 2 + ratios)
    taken = iter([seconds for ratio in pairs for seconds in (1.0, 3 * ratio, ratio / 3)])
    calls = list[int]()
    monkeypatch.setattr(autotune, "timed", lambda *_: calls.append(0) or next(taken))
    found = autotune.measure(lambda: None, [(lambda: None, 0.25), (lambda: None, 0.75)], CPU)
    assert dataclasses.astuple(found)[:3] == pytest.approx(dataclasses.astuple(decision)[:3])
    assert (len(calls) // 3 - 2, found.settled, found.pays) == (rounds, rounds < 21, decision.high < 1)


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (Decision(0.87, 0.12, 9.63), "left alone: 0.87 (0.12 to 9.63) of the untouched time, measured here, undecided"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "left alone: memory ran out in the measurement"),
    ],
)
def test_what_stays_undecided_is_left_alone(
    pipe: Any, own_cache: Path, measuring: Measure, outcome: Any, reason: str, recwarn: pytest.WarningsRecorder
) -> None:
    """It is not written down, but a plan and the patch after it decide alike. Another failure shows."""
    answers = iter([outcome, PAYS])

    def answer(*_: Any) -> Any:
        if isinstance(found := next(answers), Exception):
            raise found
        return found

    measuring(answer)
    untouched = runner(pipe)()
    plan = elfatt_sd.plan(pipe, BLOCKS, autotune=True)
    assert not any(layer.patched for layer in plan.layers)
    with elfatt_sd.patched(pipe, BLOCKS, autotune=True):
        assert torch.equal(runner(pipe)(), untouched)
    assert not (own_cache / "autotune.json").exists()
    assert plan.layers[0].reason.endswith(reason)
    assert [reason in str(each.message) for each in recwarn] == [True] * isinstance(outcome, Exception)
    answers = iter([RuntimeError("index 3 is out of bounds")])
    with pytest.raises(RuntimeError, match="out of bounds"):
        str(elfatt_sd.plan(pipe, "tome", autotune=True))


@pytest.mark.parametrize(
    ("phase", "settings", "shares"),
    [
        ({"ratio": 0.5}, {}, [1]),
        ({"ratio": 0.5}, {"reuse_layers": True, "reuse_steps": 4}, [1 / 12, 11 / 12]),
        ({"attention": "block", "block_order": "spread"}, {"attention_backend": "native"}, [1]),
        ({"attention": "sampled", "residual_steps": 4}, {}, [1, 1 / 4]),
        ({"attention": "sampled", "residual_steps": 4, "residual_guidance": True}, {}, [1, 1 / 8]),
    ],
)
def test_what_is_timed(
    pipe: Any, phase: Any, settings: Any, shares: list[float], measuring: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exact layer as it would run, by a backend too; a matching in the first of the calls that share it alone."""
    state, config = state_of(pipe, PatchConfig("x", (Phase(1.0, **phase),), **settings)), Phase(1.0, **phase)
    originals = counting(monkeypatch, state.patched, "original")
    drawn = counting(monkeypatch, Draws, "uniform")
    matched = counting(monkeypatch, layer_state, "find_candidates")
    state.patched.patch.layers = state.patched.patch.layers * 3

    def record(untouched: Any, approximated: Any, device: torch.device) -> None:
        assert [share for _, share in approximated] == pytest.approx(shares)
        drawn.clear()
        untouched()
        assert (len(originals), len(drawn)) == (int("attention_backend" not in settings), 0)
        for function, _ in approximated:
            function(), function()
        assert len(drawn) == 2 * (1 + (len(shares) > 1 and "ratio" in phase))
        assert len(matched) == 2 * ("ratio" in phase)
        assert (approximated[-1][0] == untouched) is ("residual_steps" in phase)

    measured = measuring(record)
    state.call.matchings["mine"], state.call.copies = None, 2
    state.begin(config, 0, CPU)
    before = state.prepared
    Tuner(pipe.unet).decide(state, config, SAMPLE)
    assert measured and state.call.matchings == {"mine": None} and state.prepared is before


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("blocks", [False, True], ids=["whole", "blocks"])
def test_compiled_layers_are_left_alone(blocks: bool, measuring: Measure) -> None:
    """Times without the compiler say nothing about them: one warning, and the reason in the plan."""
    text, unet, measured = torch.zeros(2, 3, tiny.TEXT_WIDTH), tiny.unet(**tiny.ONE_LEVEL), measuring()
    reason = "left alone: not measured, because torch.compile was applied"
    with torch.no_grad():
        untouched = unet(SAMPLE + 1, 0, text).sample
        unet = elfatt_sd.apply_patch(unet if blocks else torch.compile(unet, backend="eager"), BLOCKS, autotune=True)
        for layer in find_layers(unet) if blocks else ():
            unet.get_submodule(layer.name.rpartition(".")[0]).compile(backend="eager")
        with pytest.warns(UserWarning, match=f"attn1 is {reason}"):
            result = unet(SAMPLE + 1, 0, text).sample
        assert torch.allclose(result, untouched, atol=1e-5)
        unet(SAMPLE + 1, 0, text)  # no second warning: warnings are errors here
    plan = elfatt_sd.plan(unet, BLOCKS, autotune=True)
    assert not any(layer.patched for layer in plan.layers) and reason in plan.layers[0].reason
    assert not measured


@pytest.mark.parametrize("offload", ["model", "layers", "meta"])
def test_weights_that_are_elsewhere(folder: Path, offload: str, measuring: Measure) -> None:
    """They are brought; but diffusers' group offloading brings them only when their block is called."""
    pipe, measured = tiny.sd15(folder, scheduler=tiny.ddim()), measuring()
    if offload == "meta":
        state = state_of(pipe, BLOCKS)
        state.layer.attention.to("meta")
        assert str(Tuner(pipe.unet).decide(state, BLOCKS.phases[0], SAMPLE)).endswith("its weights are offloaded")
        return
    if offload == "model":
        pipe.enable_model_cpu_offload(device=CPU)
    else:
        for part in (pipe.unet, pipe.vae, pipe.text_encoder):
            accelerate.cpu_offload(part, execution_device=CPU)
    assert sum(layer.patched for layer in elfatt_sd.plan(pipe, "tome", autotune=True).layers) == 3
    elfatt_sd.apply_patch(pipe, "tome", autotune=True)
    assert runner(pipe)().isfinite().all()
    assert len(measured) == 1, "the plan's decision"


PHASE = Phase(1.0, "elfatt", ratio=0.5, block_size=16)


def key(pipe: Any, phase: Phase = PHASE, sample: torch.Tensor = SAMPLE, change: Any = None, **settings: Any) -> str:
    """The key of a decision on a layer of its own, which `change` may change."""
    state = state_of(pipe, PatchConfig("x", (phase,), **settings))
    state.layer = dataclasses.replace(state.layer, attention=copy.deepcopy(state.layer.attention))
    state.patched.patch.layers.append(copy.copy(state.patched))
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(change, tuple):
            patch.setattr(*change)
        elif change is not None:
            change(state)
        return decision_key(state, phase, sample)


DIFFERENT: list[dict[str, Any]] = [
    {},
    {"change": (autotune, "device_name", lambda _: "another")},
    {"change": (torch, "get_num_threads", lambda: 99)},
    *({"change": (package, "__version__", "99")} for package in (torch, diffusers, elfatt_sd)),
    {"change": lambda state: setattr(state.patched, "original", AttnProcessor())},
    {"change": lambda state: setattr(state.patched, "original", SlicedAttnProcessor(1))},
    {"change": lambda state: setattr(state.patched, "fused", True)},
    {"change": lambda state: setattr(state.layer.attention, "heads", 4)},
    {"change": lambda state: setattr(state.layer.attention, "inner_dim", 32)},
    {"change": lambda state: setattr(state, "grid", (8, 32))},
    {"change": lambda state: setattr(state, "layer", dataclasses.replace(state.layer, channels_first=False))},
    *({"attention_backend": "native"}, {"fp32_logits": True}, {"reuse_steps": 2}, {"use_rand": False}),
    *({"phase": PHASE.with_settings({name: value})} for name, value in {"ratio": 0.25, "stride": 4}.items()),
    *({"phase": PHASE.with_settings({name: 8})} for name in ("block_size", "agents")),
    *({"phase": Phase(1.0, "block", ratio=0.5, block_size=16)}, {"sample": SAMPLE.half()}, {"sample": SAMPLE[:1]}),
]


def test_what_a_decision_holds_for(pipe: Any) -> None:
    """One machine, layer, configuration, phase and input; whatever the seed and the end of the phase."""
    found = [key(pipe, **given) for given in DIFFERENT]
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            found.append(key(pipe))
    assert len(set(found)) == len(found)
    assert key(pipe, dataclasses.replace(PHASE, until=0.5), seed=7) == found[0]


@pytest.mark.parametrize("content", ["", "[]", '{"a": {"b": 1}}', "\x00"])
def test_processes_share_a_file(tmp_path: Path, content: str) -> None:
    """A damaged one counts as empty; a folder that cannot be written costs nothing but another measurement."""
    path = tmp_path / "autotune.json"
    path.write_text(content)
    assert read_decisions(path) == {}
    keep_decision(path, "a", PAYS)
    path.write_text(json.dumps({**json.loads(path.read_text()), "b": dataclasses.asdict(PAYS)}))  # by another process
    for key, place in (("c", path), ("a", path / "under a file.json")):
        keep_decision(place, key, PAYS)
    assert read_decisions(path) == {"a": PAYS, "b": PAYS, "c": PAYS} and read_decisions(place) == {}
