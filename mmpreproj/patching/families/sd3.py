"""Stable Diffusion 3 and its ControlNet, whose attention concatenates [image, text]; and AuraFlow, [text, image]."""

from __future__ import annotations

from mmpreproj.patching.families.row import AttentionSite, Family, Stream
from mmpreproj.patching.families.seams import Argument, PointSeam, PositionSeam

_IMAGE = Stream("image", argument="hidden_states", position=0, output=0)
_TEXT = Stream("text", argument="encoder_hidden_states", position=1, output=1)
_SD3_TEXT = Stream("text", argument="encoder_hidden_states", position=1, output=1, discarded_by="context_pre_only")
# A block of the ControlNet for SD3.5 Large attends to the image alone.
_CONTROL_TEXT = Stream("text", argument="encoder_hidden_states", position=1, output=1, taken_by="add_k_proj")

SD3: tuple[Family, ...] = (
    Family(
        model_class="SD3Transformer2DModel",
        blocks="transformer_blocks",
        sites=(
            AttentionSite("attn", (_IMAGE, _SD3_TEXT)),
            AttentionSite("attn2", (_IMAGE,), dual=True),
        ),
        width="query_dim",
        heads="heads",
        norm="AdaLN-Zero (AdaLN-Continuous for the text of the last block)",
        gate="gate_msa per stream, gate_msa2 for attn2",
        positions="absolute sin-cos in the patch embedding",
        settings=("qk_norm", "dual_attention_layers"),
        seam=PositionSeam(
            latents=Argument("hidden_states", 0),
            text=Argument("encoder_hidden_states", 1),
            attention_kwargs=Argument("joint_attention_kwargs", 5),
            patch_embedding="pos_embed",
            patch_size="patch_size",
            sample_size="sample_size",
            processor="JointAttnProcessor2_0",
        ),
        points=PointSeam(
            latents=Argument("hidden_states", 0),
            pooled=Argument("pooled_projections", 2),
            attention_kwargs=Argument("joint_attention_kwargs", 5),
            conditioning="time_text_embed",
            norm="norm1",
            feed_forward_norm="norm2",
            feed_forward="ff",
        ),
    ),
    Family(
        model_class="SD3ControlNetModel",
        blocks="transformer_blocks",
        sites=(
            AttentionSite("attn", (_IMAGE, _CONTROL_TEXT)),
            AttentionSite("attn2", (_IMAGE,), dual=True),
        ),
        width="query_dim",
        heads="heads",
        norm="AdaLN-Zero",
        gate="gate_msa per stream, gate_msa2 for attn2",
        positions="absolute sin-cos in the patch embedding",
        unread=("text",),
        settings=("qk_norm", "dual_attention_layers", "joint_attention_dim"),
    ),
    Family(
        model_class="AuraFlowTransformer2DModel",
        blocks="joint_transformer_blocks",
        sites=(AttentionSite("attn", (_IMAGE, _TEXT)),),
        width="query_dim",
        heads="heads",
        norm="AdaLN-Zero in fp32",
        gate="gate_msa per stream; but the gated output and the residual are normed together and read by the "
        "feed-forward alone, so the skip reaches the stream through the feed-forward",
        positions="absolute, learned, in the patch embedding",
        unread=("text",),
        followed_by="single_transformer_blocks",
        settings=("num_single_dit_layers",),
    ),
)
