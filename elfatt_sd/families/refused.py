"""Transformers of diffusers that have no family here, and why."""

from __future__ import annotations

_LINEAR = "its self-attention is linear already"
_NO_IMAGE = "its tokens are none of an image or video"
_CACHED = "it keeps keys and values of earlier frames, which a sample of the present ones would leave out"
_MODULAR = "it comes in modular pipelines alone, which are not known here"
_OTHERS = "how its layers attend is not known to this version"

_REASONS: dict[str, tuple[str, ...]] = {
    _LINEAR: (
        "SanaTransformer2DModel",
        "SanaVideoTransformer3DModel",
        "SanaWMLTX2RefinerTransformer3DModel",
        "SanaWMTransformer3DModel",
    ),
    _NO_IMAGE: (
        "AceStepTransformer1DModel",
        "LongCatAudioDiTTransformer",
        "MiniMaxMusic3RVQDepthDecoder",
        "MiniMaxMusic3Transformer1DModel",
        "PriorTransformer",
        "RFD4ProteinaTransformer",
        "StableAudio3DiTModel",
        "StableAudioDiTModel",
        "T5FilmDecoder",
    ),
    _CACHED: (
        "AnyFlowFARTransformer3DModel",
        "HeliosTransformer3DModel",
        "HunyuanVideoFramepackTransformer3DModel",
    ),
    _MODULAR: ("Flux3Transformer2DModel", "MiniMaxH3Transformer3DModel"),
    _OTHERS: (
        "AllegroTransformer3DModel",
        "AnyFlowTransformer3DModel",
        "AuraFlowTransformer2DModel",
        "BriaFibo2Transformer2DModel",
        "BriaFiboTransformer2DModel",
        "BriaTransformer2DModel",
        "ChronoEditTransformer3DModel",
        "CogView3PlusTransformer2DModel",
        "CogView4Transformer2DModel",
        "ConsisIDTransformer3DModel",
        "Cosmos3OmniTransformer",
        "CosmosTransformer3DModel",
        "DiTTransformer2DModel",
        "DreamLiteTransformer2DModel",
        "DualTransformer2DModel",
        "EasyAnimateTransformer3DModel",
        "ErnieImageTransformer2DModel",
        "GlmImageTransformer2DModel",
        "HiDreamImageTransformer2DModel",
        "HunyuanDiT2DModel",
        "HunyuanImageTransformer2DModel",
        "Ideogram4Transformer2DModel",
        "JoyImageEditPlusTransformer3DModel",
        "JoyImageEditTransformer3DModel",
        "Kandinsky5Transformer3DModel",
        "Kandinsky6SRTransformer3DModel",
        "Kandinsky6Transformer3DModel",
        "Krea2Transformer2DModel",
        "LTX2VideoTransformer3DModel",
        "LatteTransformer3DModel",
        "LongCatImageTransformer2DModel",
        "Lumina2Transformer2DModel",
        "LuminaNextDiT2DModel",
        "MochiTransformer3DModel",
        "MotifVideoTransformer3DModel",
        "NucleusMoEImageTransformer2DModel",
        "OmniGenTransformer2DModel",
        "OvisImageTransformer2DModel",
        "PRXTransformer2DModel",
        "QwenImage21Transformer2DModel",
        "SkyReelsV2Transformer3DModel",
        "Transformer2DModel",
        "TransformerTemporalModel",
        "WanAnimate2Transformer3DModel",
        "WanAnimateTransformer3DModel",
        "WanVACETransformer3DModel",
    ),
}
REFUSED: dict[str, str] = {name: reason for reason, names in _REASONS.items() for name in names}


def reason_against(name: str) -> str:
    """Say why modules of a class are not patched; of one that this version never saw, that it did not."""
    return REFUSED.get(name, _OTHERS)
