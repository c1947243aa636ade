"""Video models: HunyuanVideo, Motif-Video, CogVideoX, Mochi, EasyAnimate; the stream of video is called image."""

from __future__ import annotations

from mmpreproj.patching.families.row import AttentionSite, Family, Stream

_IMAGE = Stream("image", argument="hidden_states", position=0, output=0)
_TEXT = Stream("text", argument="encoder_hidden_states", position=1, output=1)
_ROTARY = "rotary at queries and keys of the video"


def _like_hunyuan(
    model_class: str, *, gate: str = "gate_msa per stream", followed_by: str | None = None, settings: tuple[str, ...]
) -> Family:
    return Family(
        model_class=model_class,
        blocks="transformer_blocks",
        sites=(AttentionSite("attn", (_IMAGE, _TEXT)),),
        width="query_dim",
        heads="heads",
        norm="AdaLN-Zero",
        gate=gate,
        positions=_ROTARY,
        unread=("text",),
        followed_by=followed_by,
        settings=settings,
    )


def _like_cogvideo(model_class: str, *, positions: str, norm: str, settings: tuple[str, ...]) -> Family:
    return Family(
        model_class=model_class,
        blocks="transformer_blocks",
        sites=(AttentionSite("attn1", (_IMAGE, _TEXT)),),
        width="query_dim",
        heads="heads",
        norm=norm,
        gate="gate_msa and enc_gate_msa",
        positions=positions,
        unread=("text",),
        settings=settings,
    )


_ONE_NORM = "one AdaLN that norms both streams; queries, keys and values have one map for both"
_ABSOLUTE_OR_ROTARY = (
    f"absolute in the patch embedding, or {_ROTARY} where use_rotary_positional_embeddings is set, by a table that "
    "the model is called with"
)

VIDEO: tuple[Family, ...] = (
    _like_hunyuan(
        "HunyuanVideoTransformer3DModel",
        gate="gate_msa per stream; another for the tokens of a given first frame where image_condition_type is "
        "token_replace",
        followed_by="single_transformer_blocks",
        settings=("num_single_layers", "text_embed_dim", "image_condition_type"),
    ),
    _like_hunyuan(
        "HunyuanVideoFramepackTransformer3DModel",
        followed_by="single_transformer_blocks",
        settings=("num_single_layers", "text_embed_dim"),
    ),
    _like_hunyuan("HunyuanVideo15Transformer3DModel", settings=("text_embed_dim", "text_embed_2_dim", "task_type")),
    _like_hunyuan(
        "MotifVideoTransformer3DModel",
        gate="gate_msa per stream; where enable_text_cross_attention_dual is set, a second attention asks the text "
        "with the output of the first, and so with the skip in it, and adds what it finds without a gate",
        followed_by="single_transformer_blocks",
        settings=("num_single_layers", "num_decoder_layers", "text_embed_dim", "enable_text_cross_attention_dual"),
    ),
    _like_cogvideo(
        "CogVideoXTransformer3DModel",
        positions=_ABSOLUTE_OR_ROTARY,
        norm=_ONE_NORM,
        settings=("use_rotary_positional_embeddings", "patch_size_t"),
    ),
    _like_cogvideo(
        "ConsisIDTransformer3DModel",
        positions=_ABSOLUTE_OR_ROTARY,
        norm=_ONE_NORM,
        settings=("use_rotary_positional_embeddings", "is_train_face"),
    ),
    Family(
        model_class="MochiTransformer3DModel",
        blocks="transformer_blocks",
        sites=(
            AttentionSite(
                "attn1",
                (
                    _IMAGE,
                    Stream(
                        "text",
                        argument="encoder_hidden_states",
                        position=1,
                        output=1,
                        discarded_by="context_pre_only",
                        width="add_k_proj.in_features",
                    ),
                ),
            ),
        ),
        width="to_q.in_features",
        heads="heads",
        norm="RMSNorm and a scale per stream; the text is narrower than the video, so share must be stream",
        gate="tanh of gate_msa per stream; but a norm of attention's output takes it and the skip together",
        positions=f"{_ROTARY}, learned",
        settings=("pooled_projection_dim",),
    ),
    _like_cogvideo(
        "EasyAnimateTransformer3DModel",
        positions=_ROTARY,
        norm="one AdaLN that norms both streams; from block mmdit_layers on, both have one map for queries, keys and "
        "values",
        settings=("mmdit_layers",),
    ),
)
