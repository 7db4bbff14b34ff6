"""Layers that a method does not make faster are left alone; what a decision holds for, and how it is kept."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import accelerate
import diffusers
import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor, SlicedAttnProcessor
from support import tiny_pipelines as tiny
from support.checks import SAMPLE, runner, state_of

import elfatt_sd
from elfatt_sd.config import PatchConfig, Phase
from elfatt_sd.families import find_layers
from elfatt_sd.methods import Draws
from elfatt_sd.runtime import autotune
from elfatt_sd.runtime import call as layer_state
from elfatt_sd.runtime.autotune import Decision, Decisions, Tuner, decision_key

pytestmark = pytest.mark.usefixtures("own_cache")
BLOCKS = PatchConfig("x", (Phase(1.0, "block", block_size=16),))
PAYS = Decision(0.5, 0.4, 0.6)


def test_a_shape_too_small_to_pay_is_left_alone(pipe: Any, own_cache: Path) -> None:
    """Merging 64 tokens of 16 channels and attending in 16 blocks costs more than attending to all of them."""
    config = PatchConfig("small", (Phase(1.0, "elfatt", ratio=0.5, block_size=2, block_order="spread"),))
    untouched = runner(pipe, height=16, width=16)()
    elfatt_sd.apply_patch(pipe, config, autotune=True)
    assert torch.equal(runner(pipe, height=16, width=16)(), untouched)
    known = json.loads((own_cache / "autotune.json").read_text())
    assert len(known) == 1  # the three layers have one shape
    assert next(iter(known.values()))["ratio"] > 1
    assert "2x8x8x16, 2 heads, torch.float32" in next(iter(known))
    plan = elfatt_sd.plan(pipe, config, height=16, width=16, autotune=True)
    assert not any(layer.patched for layer in plan.layers)
    assert "left alone: " in plan.layers[0].reason
    assert "of the untouched time, measured here" in plan.layers[0].reason
    assert plan.multiply_adds_after == plan.multiply_adds_before


def test_a_shape_that_pays_is_patched(pipe: Any) -> None:
    """4096 tokens in blocks of 64 are 64 times less attention."""
    config = PatchConfig("large", (Phase(1.0, "block", block_size=64),))
    plan = elfatt_sd.plan(pipe, config, height=128, width=128, autotune=True)
    assert [layer.patched for layer in plan.layers].count(True) == 3
    assert plan.multiply_adds_after < plan.multiply_adds_before


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Decision]:
    """Every measurement says that the approximation pays, and is counted."""
    made: list[Decision] = []

    def pretend(untouched: Any, approximated: Any, device: torch.device) -> Decision:
        untouched()
        for function, _ in approximated:
            function()
        made.append(PAYS)
        return made[-1]

    monkeypatch.setattr(autotune, "measure", pretend)
    return made


def test_each_phase_and_shape_is_measured_once(pipe: Any, measured: list[Decision]) -> None:
    elfatt_sd.apply_patch(pipe, "elfatt")
    expected = runner(pipe)()
    elfatt_sd.apply_patch(pipe, "elfatt", autotune=True)
    assert torch.equal(runner(pipe)(), expected)  # measuring leaves no trace in the result
    assert len(measured) == 2
    runner(pipe)()
    elfatt_sd.apply_patch(pipe, "elfatt", autotune=True)  # from the file
    runner(pipe)()
    assert len(measured) == 2
    runner(pipe, guidance_scale=1.0)()  # another batch
    assert len(measured) == 4


def test_offloaded_weights_are_not_measured(folder: Path) -> None:
    """diffusers' group offloading brings them only when their block is called."""
    pipe = tiny.sd15(folder)
    state = state_of(pipe, BLOCKS)
    state.begin(BLOCKS.phases[0], 0, SAMPLE.device)
    state.layer.attention.to("meta")
    assert str(Tuner(pipe.unet).decide(state, BLOCKS.phases[0], SAMPLE)).endswith("because its weights are offloaded")


def test_what_is_drawn_in_every_step_is_measured(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each measured call draws its own blocks; those of the real step stay."""
    config = PatchConfig("spread", (Phase(1.0, "block", block_size=16, block_order="spread"),))
    state = state_of(pipe, config)
    state.begin(config.phases[0], 7, SAMPLE.device)
    before = state.prepared
    drawn: list[int] = []

    def count(untouched: Any, approximated: Any, device: torch.device) -> Decision:
        untouched()
        with pytest.MonkeyPatch.context() as patch:
            draw = Draws.uniform
            patch.setattr(Draws, "uniform", lambda self, *args: (drawn.append(0), draw(self, *args))[1])
            [(approximate, share)] = approximated
            assert share == 1
            approximate()
            approximate()
        return PAYS

    monkeypatch.setattr(autotune, "measure", count)
    assert Tuner(pipe.unet).decide(state, config.phases[0], SAMPLE).pays
    assert len(drawn) == 2
    assert state.prepared is before


@pytest.mark.parametrize(
    ("ratios", "rounds", "decision"),
    [
        ([0.5] * 7, 3, Decision(0.5, 0.5, 0.5)),  # three rounds where all of them agree by a quarter
        ([2.0] * 7, 3, Decision(2.0, 2.0, 2.0)),
        ([1.1] * 7, 7, Decision(1.1, 1.1, 1.1)),
        ([0.5, 0.5, 0.9, 0.5, 0.5, 0.5, 0.5], 7, Decision(0.5, 0.5, 0.9)),
        ([0.9, 9.0, *[0.9] * 19], 8, Decision(0.9, 0.9, 0.9)),  # the second smallest and largest bound the median
        ([0.87, 0.12, 9.63] * 7, 21, Decision(0.87, 0.12, 9.63)),
    ],
)
def test_rounds_until_it_is_clear(
    ratios: list[float], rounds: int, decision: Decision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After two that warm up."""
    taken, calls = iter([1.0, 9.0] * 2 + [seconds for ratio in ratios for seconds in (1.0, ratio)]), list[int]()
    monkeypatch.setattr(autotune, "_seconds", lambda *_: calls.append(0) or next(taken))
    assert autotune.measure(lambda: None, [(lambda: None, 1.0)], torch.device("cpu")) == decision
    assert len(calls) // 2 - 2 == rounds
    assert decision.settled is (rounds < 21)
    assert decision.pays is (decision.high < 1)


def test_what_stays_undecided_is_left_alone(pipe: Any, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not written down, but a plan and the patch after it decide alike."""
    answers = iter([Decision(0.87, 0.12, 9.63), PAYS])
    monkeypatch.setattr(autotune, "measure", lambda *_: next(answers))
    untouched = runner(pipe)()
    with elfatt_sd.patched(pipe, BLOCKS, autotune=True) as plan:
        assert not any(layer.patched for layer in plan.layers)
        assert torch.equal(runner(pipe)(), untouched)
    assert not (own_cache / "autotune.json").exists()
    said = "left alone: 0.87 (0.12 to 9.63) of the untouched time, measured here, undecided"
    assert plan.layers[0].reason.endswith(said)


@pytest.mark.parametrize(("backend", "own"), [("auto", True), ("native", False)])
def test_the_exact_layer_is_timed_as_it_would_run(
    pipe: Any, backend: str, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a backend, that serves the layers which are left alone too."""
    calls: list[str] = []
    config = PatchConfig("x", (Phase(1.0, "sampled", block_size=16),), attention_backend=backend)
    state = state_of(pipe, config)
    original = state.patched.original
    state.patched.original = lambda *given, **named: (calls.append("original"), original(*given, **named))[1]
    approximate = autotune.approximate
    monkeypatch.setattr(
        autotune, "approximate", lambda *given: (calls.append(given[2].attention.name), approximate(*given))[1]
    )

    def once(untouched: Any, approximated: Any, device: torch.device) -> Decision:
        untouched()
        return PAYS

    monkeypatch.setattr(autotune, "measure", once)
    state.begin(config.phases[0], 0, SAMPLE.device)
    assert Tuner(pipe.unet).pays(state, config.phases[0], SAMPLE)
    assert calls == ["original" if own else "softmax"]


def compile_blocks(unet: Any) -> Any:
    for layer in find_layers(unet):
        unet.get_submodule(layer.name.rpartition(".")[0]).compile(backend="eager")
    return unet


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("compiled", "patch_first"),
    [(lambda unet: torch.compile(unet, backend="eager"), False), (compile_blocks, True)],
    ids=["whole", "blocks"],
)
def test_compiled_layers_are_left_alone(compiled: Any, patch_first: bool, measured: list[Decision]) -> None:
    """Times without the compiler say nothing about them: one warning, and the reason in the plan."""
    torch._dynamo.reset()
    config = BLOCKS
    text = torch.zeros(2, 3, tiny.TEXT_WIDTH)
    unet = tiny.unet()
    with torch.no_grad():
        untouched = unet(SAMPLE + 1, 0, text).sample
        if patch_first:
            unet = compiled(elfatt_sd.apply_patch(unet, config, autotune=True))
        else:
            unet = elfatt_sd.apply_patch(compiled(unet), config, autotune=True)
        with pytest.warns(UserWarning, match="attn1 is left alone: not measured, because torch.compile was applied"):
            result = unet(SAMPLE + 1, 0, text).sample
        assert torch.allclose(result, untouched, atol=1e-5)
        unet(SAMPLE + 1, 0, text)  # no second warning: warnings are errors here
    plan = elfatt_sd.plan(unet, config, autotune=True)
    assert not any(layer.patched for layer in plan.layers)
    assert "left alone: not measured, because torch.compile was applied" in plan.layers[0].reason
    assert not measured


@pytest.mark.parametrize("by_model", [True, False])
def test_weights_that_are_elsewhere(folder: Path, by_model: bool, measured: list[Decision]) -> None:
    pipe = tiny.sd15(folder, scheduler=tiny.ddim())
    if by_model:
        pipe.enable_model_cpu_offload(device=torch.device("cpu"))
    else:
        for part in (pipe.unet, pipe.vae, pipe.text_encoder):
            accelerate.cpu_offload(part, execution_device=torch.device("cpu"))
    plan = elfatt_sd.plan(pipe, "tome", autotune=True)
    assert sum(layer.patched for layer in plan.layers) == 3
    assert len(measured) == 1
    elfatt_sd.apply_patch(pipe, "tome", autotune=True)
    assert runner(pipe)().isfinite().all()
    assert len(measured) == 1  # the plan's decision


def test_the_device_is_that_of_the_first_hook_that_names_one() -> None:
    net: Any = torch.nn.Sequential(torch.nn.Linear(1, 1))
    net.device = torch.device("meta")
    assert autotune._execution_device(net) == torch.device("meta")
    net._hf_hook = accelerate.hooks.AlignDevicesHook(io_same_device=True)
    net[0]._hf_hook = accelerate.hooks.AlignDevicesHook(execution_device="cuda:0")
    assert autotune._execution_device(net) == torch.device("cuda:0")


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried to"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: str(error)[:20])
def test_out_of_memory_counts_as_not_paying(
    pipe: Any, own_cache: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def fail(*_: Any) -> Decision:
        tried.append(0)
        raise error

    monkeypatch.setattr(autotune, "measure", fail)
    untouched = runner(pipe)()
    elfatt_sd.apply_patch(pipe, "tome", autotune=True)
    with pytest.warns(UserWarning, match="is left alone: memory ran out in the measurement"):
        assert torch.equal(runner(pipe)(), untouched)
    assert len(tried) == 1
    assert not (own_cache / "autotune.json").exists()
    reason = elfatt_sd.plan(pipe, "tome", autotune=True).layers[0].reason
    assert reason.endswith("left alone: memory ran out in the measurement")


def test_another_failure_shows_and_changes_no_matching(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(untouched: Any, approximated: Any, device: torch.device) -> Decision:
        approximated[0][0]()
        raise RuntimeError("index 3 is out of bounds")

    monkeypatch.setattr(autotune, "measure", fail)
    config = PatchConfig("x", (Phase(1.0, ratio=0.5),), reuse_steps=2)
    state = state_of(pipe, config)
    state.call.matchings["mine"] = None
    state.begin(config.phases[0], 0, SAMPLE.device)
    with pytest.raises(RuntimeError, match="out of bounds"):
        Tuner(pipe.unet).decide(state, config.phases[0], SAMPLE)
    assert state.call.matchings == {"mine": None}


@pytest.mark.parametrize(
    ("settings", "uses"),
    [({}, 1), ({"reuse_steps": 4}, 4), ({"reuse_layers": True}, 3), ({"reuse_layers": True, "reuse_steps": 4}, 12)],
)
def test_a_shared_matching_costs_each_layer_its_part(
    pipe: Any, settings: dict[str, Any], uses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of the calls that share a matching is timed with it, the others without."""
    found: list[int] = []
    match = layer_state.find_candidates
    monkeypatch.setattr(layer_state, "find_candidates", lambda *given: (found.append(0), match(*given))[1])
    shares: list[float] = []

    def record(untouched: Any, approximated: Any, device: torch.device) -> Decision:
        for number, (function, share) in enumerate(approximated):
            function()
            function()
            assert len(found) == 2
            assert number < 2
            shares.append(share)
        return PAYS

    monkeypatch.setattr(autotune, "measure", record)
    elfatt_sd.plan(pipe, PatchConfig("x", (Phase(1.0, ratio=0.5),), **settings), autotune=True)
    assert shares == pytest.approx([1 / uses, 1 - 1 / uses][:uses])


def test_exact_steps_weigh_their_share(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guidance decides what an exact step costs: a call whose rows share nothing is decided for itself."""
    shares: list[float] = []

    def record(untouched: Any, approximated: Any, device: torch.device) -> Decision:
        [(own, whole), (exact, share)] = approximated
        assert (whole, exact) == (1.0, untouched) and own is not untouched
        shares.append(share)
        return PAYS

    monkeypatch.setattr(autotune, "measure", record)
    phase = Phase(1.0, "sampled", block_size=16, residual_steps=4, residual_guidance=True)
    state, tuner = state_of(pipe, PatchConfig("x", (phase,))), Tuner(pipe.unet)
    for state.call.copies in (1, 2, 1, 2):
        tuner.decide(state, phase, SAMPLE)
    assert shares == [0.25, 0.125]
    monkeypatch.undo()
    first, others = (lambda: None), (lambda: None)
    monkeypatch.setattr(autotune, "_seconds", lambda function, device: {first: 4.0, others: 1.0}.get(function, 8.0))
    decision = autotune.measure(lambda: None, [(first, 0.25), (others, 0.75)], torch.device("cpu"))
    assert decision.ratio == pytest.approx((0.25 * 4 + 0.75 * 1) / 8)


def test_a_block_measures_nothing_before_its_first_call(pipe: Any, measured: list[Decision]) -> None:
    """Nobody may look at the plan, and the model's own size may not be the one that is drawn."""
    with elfatt_sd.patched(pipe, "tome", autotune=True) as plan:
        with elfatt_sd.patched(pipe, "elfatt"):
            pass
        assert not measured
        runner(pipe)()
        assert len(measured) == 1, "it is measured still after another block"
        assert "tome" in str(plan) and plan.config.method == "tome"


def test_a_long_measurement_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter(range(0, 10_000, 60))
    monkeypatch.setattr(autotune.time, "monotonic", lambda: next(moments))
    with pytest.warns(UserWarning, match="measures a layer of this size for about 480 s"):
        autotune.measure(lambda: None, [(lambda: None, 1.0)], torch.device("cpu"))


PHASE = Phase(1.0, "elfatt", ratio=0.5, block_size=16)


def key(pipe: Any, phase: Phase = PHASE, sample: torch.Tensor = SAMPLE, change: Any = None, **settings: Any) -> str:
    """The key of a decision on a layer of its own, which `change` may change."""
    state = state_of(pipe, PatchConfig("x", (phase,), **settings))
    state.layer = dataclasses.replace(state.layer, attention=copy.deepcopy(state.layer.attention))
    state.patched.patch.layers.append(copy.copy(state.patched))
    if change is not None:
        change(state)
    return decision_key(state, phase, sample)


KEY_CHANGES: dict[str, Any] = {
    "another processor": (autotune, "device_name", lambda _: "another"),
    "more threads": (torch, "get_num_threads", lambda: 99),
    "torch": (torch, "__version__", "99"),
    "diffusers": (diffusers, "__version__", "99"),
    "elfatt-sd": (elfatt_sd, "__version__", "99"),
}
STATE_CHANGES: dict[str, Any] = {
    "processor's class": lambda state: setattr(state.patched, "original", AttnProcessor()),
    "slices": lambda state: setattr(state.patched, "original", SlicedAttnProcessor(1)),
    "fused projections": lambda state: setattr(state.patched, "fused", True),
    "heads": lambda state: setattr(state.layer.attention, "heads", 4),
    "channels": lambda state: setattr(state.layer.attention, "inner_dim", 32),
    "grid": lambda state: setattr(state, "grid", (8, 32)),
    "layout": lambda state: setattr(state, "layer", dataclasses.replace(state.layer, channels_first=False)),
}
CONFIG_CHANGES = {"attention_backend": "native", "fp32_logits": True, "reuse_steps": 2, "use_rand": False}
PHASE_CHANGES: dict[str, Any] = {"attention": "block", "ratio": 0.25, "stride": 4, "block_size": 32, "agents": 8}


@pytest.mark.parametrize("change", [*KEY_CHANGES, *STATE_CHANGES, *CONFIG_CHANGES, *PHASE_CHANGES])
def test_what_a_decision_holds_for(pipe: Any, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One machine, layer, configuration, phase and input; whatever the seed and the end of the phase."""
    before = key(pipe)
    assert key(pipe, dataclasses.replace(PHASE, until=0.5), seed=7) == before
    if change in KEY_CHANGES:
        monkeypatch.setattr(*KEY_CHANGES[change])
        assert key(pipe) != before
    elif change in STATE_CHANGES:
        assert key(pipe, change=STATE_CHANGES[change]) != before
    elif change in CONFIG_CHANGES:
        assert key(pipe, **{change: CONFIG_CHANGES[change]}) != before
    else:
        assert key(pipe, dataclasses.replace(PHASE, **{change: PHASE_CHANGES[change]})) != before


def test_a_decision_holds_for_one_input(pipe: Any) -> None:
    keys = [key(pipe), key(pipe, sample=SAMPLE.half()), key(pipe, sample=SAMPLE[:1])]
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            keys.append(key(pipe))
    assert len(set(keys)) == 5


@pytest.mark.parametrize("content", ["", "[]", '{"a": {"b": 1}}', "\x00"])
def test_a_damaged_file_counts_as_empty(tmp_path: Path, content: str) -> None:
    """A folder that cannot be written costs nothing but another measurement."""
    path = tmp_path / "autotune.json"
    path.write_text(content)
    for decisions in (Decisions(path), Decisions(path / "under a file.json")):
        assert decisions.get("a") is None
        decisions.put("a", PAYS)
        assert decisions.get("a") == PAYS
    assert Decisions(path).get("a") == PAYS


def test_processes_that_share_a_file_keep_each_others_decisions(tmp_path: Path) -> None:
    path, decision = tmp_path / "autotune.json", Decision(0.5, 0.4, 0.6)
    first, second = Decisions(path), Decisions(path)
    assert first.get("a") is second.get("a") is None
    first.put("a", decision)
    second.put("b", decision)
    first.put("c", decision)
    assert sorted(json.loads(path.read_text())) == ["a", "b", "c"]
    assert first.get("b") == second.get("c") == decision
