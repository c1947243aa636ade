"""Further image models: Qwen-Image, HiDream, HunyuanImage, CogView, GLM-Image and JoyImage."""

from __future__ import annotations

from mmpreproj.patching.families.row import AttentionSite, Family, Stream

_IMAGE = Stream("image", argument="hidden_states", position=0, output=0)
_TEXT = Stream("text", argument="encoder_hidden_states", position=1, output=1)


def _like_qwen(model_class: str) -> Family:
    return Family(
        model_class=model_class,
        blocks="transformer_blocks",
        sites=(AttentionSite("attn", (_IMAGE, _TEXT)),),
        width="query_dim",
        heads="heads",
        norm="LayerNorm and a modulation per stream",
        gate="a gate per stream; one per image of an edited pair where zero_cond_t is set",
        positions="rotary at queries and keys, over 3 axes of the image and along the text",
        unread=("text",),
        settings=("joint_attention_dim",),
    )


def _like_cogview(model_class: str, *, positions: str) -> Family:
    return Family(
        model_class=model_class,
        blocks="transformer_blocks",
        sites=(AttentionSite("attn1", (_IMAGE, _TEXT)),),
        width="query_dim",
        heads="heads",
        norm="one AdaLN that norms both streams; queries, keys and values have one map for both",
        gate="gate_msa and c_gate_msa",
        positions=positions,
        unread=("text",),
        settings=("text_embed_dim",),
    )


def _like_joyimage(model_class: str, *, positions: str) -> Family:
    return Family(
        model_class=model_class,
        blocks="double_blocks",
        sites=(AttentionSite("attn", (_IMAGE, _TEXT)),),
        width="img_attn_qkv.in_features",
        heads="heads",
        norm="LayerNorm in fp32 and a modulation per stream",
        gate="a gate per stream",
        positions=positions,
        unread=("text",),
        settings=("text_dim", "rope_type"),
    )


IMAGE: tuple[Family, ...] = (
    _like_qwen("QwenImageTransformer2DModel"),
    _like_qwen("QwenImageControlNetModel"),
    Family(
        model_class="HiDreamImageTransformer2DModel",
        blocks="double_stream_blocks",
        sites=(
            AttentionSite(
                "block.attn1",
                (
                    Stream("image", argument="norm_hidden_states", position=0, output=0),
                    Stream("text", argument="norm_encoder_hidden_states", position=2, output=1),
                ),
            ),
        ),
        width="query_dim",
        heads="heads",
        norm="LayerNorm and a modulation per stream",
        gate="a gate per stream; of the text, each block keeps what T5 and Llama's last layer brought, and throws "
        "away its own layer of Llama, and with it what a skip added there",
        positions="rotary at queries and keys, over the image; the text is at 0",
        unread=("text",),
        followed_by="single_stream_blocks",
        settings=("num_single_layers", "llama_layers"),
    ),
    Family(
        model_class="HunyuanImageTransformer2DModel",
        blocks="transformer_blocks",
        sites=(AttentionSite("attn", (_IMAGE, _TEXT)),),
        width="query_dim",
        heads="heads",
        norm="AdaLN-Zero",
        gate="gate_msa per stream",
        positions="rotary at queries and keys of the image",
        unread=("text",),
        followed_by="single_transformer_blocks",
        settings=("num_single_layers", "text_embed_dim", "text_embed_2_dim"),
    ),
    _like_cogview("CogView3PlusTransformer2DModel", positions="absolute sin-cos in the patch embedding"),
    _like_cogview("CogView4Transformer2DModel", positions="rotary at queries and keys of the image"),
    _like_cogview("GlmImageTransformer2DModel", positions="rotary at queries and keys of the image"),
    _like_joyimage(
        "JoyImageEditTransformer3DModel",
        positions="rotary at queries and keys of the images, and of the text where rope_type is mrope",
    ),
    _like_joyimage(
        "JoyImageEditPlusTransformer3DModel", positions="rotary at queries and keys, over 3 axes of several images"
    ),
)
