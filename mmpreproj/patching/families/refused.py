"""The model classes of diffusers' transformers and ControlNets that no row binds, each with the reason.

Those that do have two streams through one attention are under `_NOT_YET`, with what a row of them would need.
"""

from __future__ import annotations

_CROSS = "its text is read by cross-attention, and has no stream of its own that the blocks change"
_ONE_STREAM = "text and image are one sequence that every block norms and maps alike, without a stream for each"
_SELF = "its attention reads one stream alone"
_PARTS = "it only holds several ControlNets; patch those in its nets, one by one"

_CROSS_ATTENTION = (
    "AceStepTransformer1DModel",
    "AllegroTransformer3DModel",
    "AnyFlowFARTransformer3DModel",
    "AnyFlowTransformer3DModel",
    "ChronoEditTransformer3DModel",
    "ControlNetModel",
    "ControlNetUnionModel",
    "ControlNetXSAdapter",
    "CosmosControlNetModel",
    "CosmosTransformer3DModel",
    "DreamLiteTransformer2DModel",
    "HeliosTransformer3DModel",
    "HunyuanDiT2DControlNetModel",
    "HunyuanDiT2DModel",
    "Kandinsky5Transformer3DModel",
    "LTXVideoTransformer3DModel",
    "LatteTransformer3DModel",
    "LongCatAudioDiTTransformer",
    "LuminaNextDiT2DModel",
    "PixArtTransformer2DModel",
    "SanaControlNetModel",
    "SanaTransformer2DModel",
    "SanaVideoTransformer3DModel",
    "SanaWMLTX2RefinerTransformer3DModel",
    "SanaWMTransformer3DModel",
    "SkyReelsV2Transformer3DModel",
    "SparseControlNetModel",
    "StableAudio3DiTModel",
    "StableAudioDiTModel",
    "T5FilmDecoder",
    "Transformer2DModel",
    "TransformerTemporalModel",
    "UNetControlNetXSModel",
    "WanAnimate2Transformer3DModel",
    "WanAnimateTransformer3DModel",
    "WanTransformer3DModel",
    "WanVACETransformer3DModel",
)
_SINGLE_STREAM = (
    "BriaFibo2Transformer2DModel",
    "ErnieImageTransformer2DModel",
    "Flux3Transformer2DModel",
    "Ideogram4Transformer2DModel",
    "Krea2Transformer2DModel",
    "Lumina2Transformer2DModel",
    "MiniMaxH3Transformer3DModel",
    "OmniGenTransformer2DModel",
    "PriorTransformer",
    "QwenImage21Transformer2DModel",
    "ZImageControlNetModel",
    "ZImageTransformer2DModel",
)
_WITHOUT_TEXT = (
    "DiTTransformer2DModel",
    "MiniMaxMusic3RVQDepthDecoder",
    "MiniMaxMusic3Transformer1DModel",
    "RFD4ProteinaTransformer",
)
_SEVERAL_NETS = (
    "FluxMultiControlNetModel",
    "HunyuanDiT2DMultiControlNetModel",
    "MultiControlNetModel",
    "MultiControlNetUnionModel",
    "QwenImageMultiControlNetModel",
    "SD3MultiControlNetModel",
)
_NOT_YET = {
    "Cosmos3OmniTransformer": "its streams are packed without a batch dimension, and its text attends causally",
}
_OTHERS = {
    "Kandinsky6SRTransformer3DModel": _CROSS,
    "Kandinsky6Transformer3DModel": _CROSS,
    "LTX2VideoTransformer3DModel": "its video and audio streams read each other and the text by cross-attention",
    "NucleusMoEImageTransformer2DModel": "its attention reads keys and values of the text, but gives no text back",
    "PRXTransformer2DModel": "its attention reads keys and values of the text, but gives no text back",
}

REFUSED: dict[str, str] = {
    **dict.fromkeys(_CROSS_ATTENTION, _CROSS),
    **dict.fromkeys(_SINGLE_STREAM, _ONE_STREAM),
    **dict.fromkeys(_WITHOUT_TEXT, _SELF),
    **dict.fromkeys(_SEVERAL_NETS, _PARTS),
    **{name: f"it is not bound yet: {reason}" for name, reason in _NOT_YET.items()},
    **_OTHERS,
}
