"""The module by itself and in models: bad input, 16 bits, compiled and exported, and timm's models."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elfatt_sd.errors import ElfattError
from elfatt_sd.nn import ElfattAttention, Pyramid, pyramid, replace_attention
from elfatt_sd.nn.backbone import ATTENTIONS

TINY: dict[str, Any] = {"depths": (1, 1, 2, 1), "dims": (8, 16, 24, 32), "heads": (2, 2, 3, 4), "classes": 5}


def test_it_loads_neither_diffusers_nor_timm() -> None:
    code = "import sys, elfatt_sd.nn; print({'diffusers', 'transformers', 'timm'} & {*sys.modules})"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=300).strip() == "set()"


def module(**settings: Any) -> ElfattAttention:
    return ElfattAttention(16, 2, **{"block_size": 4, **settings})


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda: ElfattAttention(10, 3), "num_heads=3 is not accepted; give a number that divides dim=10"),
        (lambda: module(block_size=2.5), "block_size=2.5"),
        (lambda: module(global_fraction=1.5), "global_fraction=1.5"),
        (lambda: module(global_fraction=0.01), "global_fraction=0.01 leaves one half no head"),
        (lambda: module(global_heads="mean"), "global_heads='mean' is not known; accepted: effatt, agent, focused"),
        (lambda: module(attn_drop=0.1), "attn_drop=0.1"),
        (lambda: module(agents=0), "agents=0"),
        (lambda: module(grid=4), "grid=4 is not accepted; give two whole numbers"),
        (lambda: module(grid=(-4, -4)), r"grid=\(-4, -4\)"),
        (lambda: module(prefix_tokens=4)(torch.zeros(1, 4, 16)), "4 tokens with prefix_tokens=4"),
        (lambda: pyramid("swin-t", "effatt", global_fraction=0.5), "global_fraction is not accepted .*'effatt'"),
        (lambda: replace_attention(nn.Linear(2, 2), qk_norm=True), "setting='qk_norm' is not known; accepted: gl"),
        (lambda: module()(torch.zeros(1, 17, 16)), r"17 tokens with prefix_tokens=0 .* give grid=\(rows, columns\)"),
        (lambda: module(prefix_tokens=1)(torch.zeros(1, 4, 4, 16)), "4 x 4 tokens with prefix_tokens=1"),
        (lambda: module(grid=(3, 5))(torch.zeros(1, 16, 16)), "16 tokens .* 3 x 5"),
        (lambda: module()(torch.zeros(1, 16, 16), attn_mask=torch.zeros(16, 16)), "attn_mask, .* are not accepted"),
        (lambda: module()(torch.zeros(1, 16, 16), is_causal=True), "is_causal and rope are not accepted"),
        (lambda: module()(torch.zeros(1, 16, 16), rope=torch.zeros(16)), "is_causal and rope are not accepted"),
        (lambda: pyramid("vit"), "name='vit' is not known; accepted: cswin-t, cswin-b, swin-t, swin-b"),
        (lambda: pyramid("swin-t", "linear"), "attention='linear' is not known; accepted: softmax, elfatt"),
        (lambda: replace_attention(nn.Linear(2, 2)), "Linear has 0 layers with qkv and proj"),
        (lambda: replace_attention(module(), every=0), "every=0"),
        (lambda: replace_attention(None), "NoneType has no layers to replace"),
        (lambda: replace_attention(nn.Sequential(module()), every=1), "0 of Sequential .*: ElfattAttention is another"),
    ],
)
def test_bad_input_is_one_line(act: Any, said: str) -> None:
    with pytest.raises(ElfattError, match=said) as raised:
        act()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_are_close_and_large_logits_train(attention: str, dtype: torch.dtype) -> None:
    own = ElfattAttention(32, 4, prefix_tokens=1, grid=(5, 7), **{"block_size": 9, **ATTENTIONS[attention]})
    x = torch.randn(2, 36, 32)
    near = torch.finfo(dtype).eps * 8
    torch.testing.assert_close(own.to(dtype)(x.to(dtype)).float(), own.float()(x), rtol=near, atol=near)
    with torch.no_grad():
        own.qkv.weight[:64] *= 50  # queries and keys
    own.to(dtype)(x.to(dtype)).float().square().mean().backward()
    assert all(torch.isfinite(each.grad).all() for each in own.parameters())


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_pyramid_takes_any_image_and_trains(attention: str) -> None:
    model, images = Pyramid(**TINY, block_size=4, attention=attention), torch.randn(2, 3, 50, 71)
    assert [each.shape[1:] for each in model.features(images)] == [(8, 12, 18), (16, 6, 9), (24, 3, 5), (32, 2, 3)]
    model(images).square().sum().backward()
    assert all(each.grad is not None for each in model.parameters())
    exact = [block.attn.block_size is None for level in model.levels for block in list(level)[1:]]
    assert exact == ([True] * 5 if attention == "softmax" else [False, False, True, False, True])


def test_it_compiles_without_a_break_and_exports() -> None:
    own = module(prefix_tokens=1).eval()
    compiled = torch.compile(own, fullgraph=True, backend="eager")
    for side in (4, 5):
        x = torch.randn(1, 1 + side * side, 16)
        torch.testing.assert_close(compiled(x), own(x))
    torch.testing.assert_close(torch.export.export(own, (x,)).module()(x), own(x))


@pytest.mark.filterwarnings("ignore")  # of the packages
def test_onnx_takes_it(tmp_path: Path) -> None:
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    runtime = pytest.importorskip("onnxruntime")
    model, x = module(prefix_tokens=1).eval(), torch.randn(1, 26, 16)
    torch.onnx.export(model, (x,), tmp_path / "model.onnx", dynamo=True, verbose=False)
    session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    [made] = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(made), model(x).detach(), rtol=1e-3, atol=1e-4)


def timm_model(name: str, **settings: Any) -> Any:
    return pytest.importorskip("timm", minversion="1.0.23").create_model(name, **settings)  # which takes `attn_layer`


VIT: dict[str, Any] = {"depth": 4, "embed_dim": 32, "num_heads": 2, "num_classes": 3}


def test_one_window_is_timms_attention() -> None:
    old = timm_model("vit_tiny_patch16_224", img_size=64, qk_norm=True, scale_attn_norm=True, **VIT).blocks[0].attn
    own = {"qk_norm": True, "scale_norm": True, "norm_layer": type(old.norm), "prefix_tokens": 1}
    new = ElfattAttention(32, 2, True, block_size=None, global_fraction=0, lepe=False, **own)
    new.load_state_dict(old.state_dict())
    x = torch.randn(2, 17, 32)
    torch.testing.assert_close(new(x), old(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "settings", "sides"),
    [
        ("vit_tiny_patch16_224", {"img_size": 64}, (64, 64)),
        ("vit_tiny_patch16_224", {"dynamic_img_size": True}, (96, 48)),
        ("vit_tiny_patch16_224", {"dynamic_img_size": True, "dynamic_img_pad": True}, (90, 50)),
        ("vit_small_patch14_dinov2", {"img_size": 70}, (70, 70)),
        ("vit_small_patch14_reg4_dinov2", {"img_size": (28, 70)}, (28, 70)),
        ("deit3_small_patch16_224", {"img_size": 64}, (64, 64)),
    ],
)
def test_replaced_attention_keeps_weights_and_finds_the_grid(name: str, settings: Any, sides: tuple[int, int]) -> None:
    model = timm_model(name, **VIT, **settings).eval()
    before = {key: each.clone() for key, each in model.state_dict().items()}
    images = torch.randn(2, 3, *sides)
    with torch.no_grad():
        expected = model(images)
        assert replace_attention(model, None, every=2, global_fraction=0) == 2
        torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-5)  # LePE begins at zero
    assert [type(block.attn).__name__ == "ElfattAttention" for block in model.blocks] == [False, True, False, True]
    model.train()(images).sum().backward()
    assert replace_attention(timm_model(name, **VIT, **settings), None, global_heads="focused") == 2
    twin = copy.deepcopy(model)
    twin.blocks[3].attn.grid = model.blocks[3].attn.grid = None
    twin(images)
    assert twin.blocks[3].attn.grid is not None is model.blocks[3].attn.grid
    missing, unexpected = model.load_state_dict(before, strict=False)
    assert {key.split("attn.")[1] for key in missing} == {"lepe.weight", "lepe.bias"} and not unexpected


def test_timm_builds_models_with_it() -> None:
    own = ElfattAttention.sized(block_size=4, prefix_tokens=1)
    model = timm_model("vit_tiny_patch16_224", img_size=64, attn_layer=own, **VIT)
    model(torch.randn(2, 3, 64, 64)).sum().backward()
    assert {block.attn.block_size for block in model.blocks} == {4}


@pytest.mark.parametrize(
    ("name", "settings", "why"),
    [
        ("swin_tiny_patch4_window7_224", {"depths": (2, 1, 1, 1)}, "WindowAttention"),
        ("beit_base_patch16_224", {"depth": 2, "embed_dim": 24, "num_heads": 2}, "relative_position_bias_table"),
        ("eva02_tiny_patch14_224", {"depth": 2}, "EvaAttention"),
        ("vit_tiny_patch16_224", {"attn_drop_rate": 0.1}, "attn_drop=0.1"),
        ("vit_tiny_patch16_224", {"img_size": 64, "patch_drop_rate": 0.5, **VIT}, "9 tokens .* do not fill 4 x 4"),
        ("nest_tiny", {"img_size": 64}, "do not fill"),
        ("naflexvit_base_patch16_gap", {"depth": 1}, r"0 x 0; give grid=\(rows, columns\)"),  # of a grid it hides
    ],
)
def test_what_cannot_be_replaced_is_named(name: str, settings: Any, why: str) -> None:
    model = timm_model(name, **settings)
    kinds = [type(each) for each in model.modules()]
    with pytest.raises(ElfattError, match=f"(attn|attention) of {type(model).__name__} cannot be replaced: .*{why}"):
        replace_attention(model, every=1)
    assert [type(each) for each in model.modules()] == kinds


def test_one_layer_in_two_places_and_a_model_within_another() -> None:
    model = nn.Sequential(timm_model("vit_tiny_patch16_224", img_size=(32, 64), **VIT))
    model[0].blocks[1].attn = model[0].blocks[0].attn
    with pytest.raises(ElfattError, match="Attention has 0 layers"):
        replace_attention(model[0].blocks[0].attn, every=1)
    assert replace_attention(model, every=1) == 3 and model[0].blocks[1].attn is model[0].blocks[0].attn
    model(torch.randn(1, 3, 32, 64))
    assert {(block.attn.grid, block.attn.prefix_tokens) for block in model[0].blocks} == {((2, 4), 1)}
