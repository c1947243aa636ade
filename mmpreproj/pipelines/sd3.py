"""Stable Diffusion 3 with the adapter: stock folders, plus a `preproj/` folder beside the components."""

from __future__ import annotations

import copy
import inspect
import json
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from diffusers.configuration_utils import FrozenDict
from diffusers.image_processor import VaeImageProcessor
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusers.pipelines.stable_diffusion_3.pipeline_output import StableDiffusion3PipelineOutput
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from torch import Tensor
from transformers import (
    CLIPTextModelWithProjection,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    SiglipImageProcessor,
    SiglipVisionModel,
)

from mmpreproj.patching.hooks import PROMPT_CLOUDS
from mmpreproj.patching.integrity import check_intact
from mmpreproj.patching.lifecycle import detached
from mmpreproj.patching.lookup import is_patched, unwrap
from mmpreproj.patching.positions.life import masks_padding
from mmpreproj.patching.positions.root import MASK, PADDING
from mmpreproj.pipelines.adapter_folder import (
    ADAPTER_FOLDER,
    check_upload,
    find_adapter,
    load_adapters,
    remove_adapters,
    save_adapters,
    saved_length,
)
from mmpreproj.pipelines.clouds import clouds_of_call
from mmpreproj.pipelines.latents import check_finite, decode_to_pixels, encode_pixels, encode_posterior
from mmpreproj.pipelines.length import LENGTH_KEY, default_length, stored_length
from mmpreproj.pipelines.origin import AdapterOrigin
from mmpreproj.pipelines.padding import mask_of_call, prompt_mask
from mmpreproj.pipelines.prompts import check_clip_encoders, encode_generically
from mmpreproj.pipelines.signatures import LENGTH, hide_defaults, signature_of

OUTPUT_TYPES = ("pil", "np", "pt", "latent")
_AS_THEY_ARE: Any = object()  # in place of a dtype


class PreProjSD3Pipeline(StableDiffusion3Pipeline):
    """Generate pictures with a Stable Diffusion 3 transformer that may carry an mmpreproj adapter.

    It is its parent, with three differences. Every component but transformer and scheduler may be missing. One generic
    transformer may stand in for the three text encoders. The adapter is saved to, and loaded from, `preproj/` beside
    the components; what lies around that folder is a stock Stable Diffusion 3 folder.

    - Without a VAE pixels are the latents: `[B, 3, H, W]` in [-1, 1], `vae_scale_factor` 1.
    - With `text_encoder` and `tokenizer` alone, the encoder being no `CLIPTextModelWithProjection`, prompts go through
      `mmpreproj.pipelines.text.encode_text`; its width must be the transformer's `joint_attention_dim` and
      `pooled_projection_dim`. The prompt length is the tokenizer's `model_max_length`, which is saved with the model.
    - Without a text encoder, pass `prompt_embeds` and `pooled_prompt_embeds`.
    - Where a call gives no `max_sequence_length`, texts are as long as in training, if that is stored with the adapter
      or the model; see the property of that name.

    Args:
        transformer: patched or not.
        scheduler: a flow-matching scheduler.
        vae: `AutoencoderKL`, `AutoencoderTiny` or None.
        text_encoder: the first CLIP encoder, a generic encoder, or None.
        tokenizer: tokenizer of `text_encoder`.
        text_encoder_2: the second CLIP encoder.
        tokenizer_2: tokenizer of `text_encoder_2`.
        text_encoder_3: T5.
        tokenizer_3: tokenizer of `text_encoder_3`.
        image_encoder: for IP-Adapter.
        feature_extractor: for IP-Adapter.
    """

    _optional_components = [  # noqa: RUF012 - diffusers reads a list
        "vae",
        "text_encoder",
        "tokenizer",
        "text_encoder_2",
        "tokenizer_2",
        "text_encoder_3",
        "tokenizer_3",
        "image_encoder",
        "feature_extractor",
    ]

    # For type checkers only: diffusers' own annotations know none of the choices below.
    transformer: Any
    vae: Any
    text_encoder: Any
    tokenizer: Any
    text_encoder_3: Any

    _adapter_origin: AdapterOrigin | None = None
    _adapter_length: int | None = None  # of texts, in the folder; asked where the transformer was left out

    @hide_defaults
    def __init__(
        self,
        transformer: SD3Transformer2DModel,
        scheduler: FlowMatchEulerDiscreteScheduler,
        vae: AutoencoderKL | AutoencoderTiny | None = None,
        text_encoder: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        text_encoder_2: PreTrainedModel | None = None,
        tokenizer_2: PreTrainedTokenizerBase | None = None,
        text_encoder_3: PreTrainedModel | None = None,
        tokenizer_3: PreTrainedTokenizerBase | None = None,
        image_encoder: SiglipVisionModel | None = None,
        feature_extractor: SiglipImageProcessor | None = None,
    ) -> None:
        components: dict[str, Any] = dict(
            transformer=transformer,
            scheduler=scheduler,
            vae=vae,
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            text_encoder_2=text_encoder_2,
            tokenizer_2=tokenizer_2,
            text_encoder_3=text_encoder_3,
            tokenizer_3=tokenizer_3,
            image_encoder=image_encoder,
            feature_extractor=feature_extractor,
        )
        super().__init__(**components)
        if vae is None:
            self.vae_scale_factor = 1
            self.image_processor = VaeImageProcessor(vae_scale_factor=1)

    @torch.no_grad()
    @signature_of(StableDiffusion3Pipeline.__call__, "point_cloud")
    def __call__(
        self, *args: Any, point_cloud: Any = None, **kwargs: Any
    ) -> StableDiffusion3PipelineOutput | tuple[Any]:
        """Generate pictures; the arguments are those of `StableDiffusion3Pipeline.__call__`, and one more.

        Args:
            args: those of the parent; `max_sequence_length` is the pipeline's own by default.
            point_cloud: what the picture is to show, for a transformer with a point path: a cloud `[P, 3 + F]` for all
                prompts, or one for each, as an array, a tensor or, where they differ in size, a list. Of more points
                than the model was trained to be shown, that many are drawn, the same ones every time. Guidance leads
                towards it, away from the negative prompt without a cloud.
            kwargs: those of the parent.

        Raises:
            ValueError: if there is a cloud but no point path, a cloud that cannot be used, or clouds in
                `joint_attention_kwargs` too; if `output_type` is none of pil, np, pt and latent, the latents cannot be
                shown as a picture without a VAE, or they are not finite; if the adapter was lost: its modules or hooks
                were replaced, or another transformer has taken the place of the one that it was loaded onto; or if it
                masks padding, and embeddings are given without `joint_attention_kwargs={"attention_mask": …}`.
        """
        call = self._bind(StableDiffusion3Pipeline.__call__, args, kwargs)
        output_type, return_dict = call.arguments["output_type"], call.arguments["return_dict"]
        self._check_adapter()
        self._check_output_type(output_type)
        self._mask_padding(call.arguments)
        if point_cloud is not None:
            clouds = clouds_of_call(self, point_cloud, call.arguments)
            attention = call.arguments["joint_attention_kwargs"] or {}
            call.arguments["joint_attention_kwargs"] = {**attention, PROMPT_CLOUDS: clouds}
        call.arguments.update(output_type="latent", return_dict=False)
        (images,) = super().__call__(*call.args[1:], **call.kwargs)
        if output_type != "latent":
            images = self.image_processor.postprocess(self.decode_latents(images), output_type=output_type)
            self.maybe_free_model_hooks()  # the parent did so too, but the VAE has run since
        return StableDiffusion3PipelineOutput(images=images) if return_dict else (images,)

    def encode_prompt_mask(
        self,
        prompt: str | list[str],
        prompt_2: str | list[str] | None = None,
        prompt_3: str | list[str] | None = None,
        *,
        max_sequence_length: int | None = None,
    ) -> Tensor:
        """Tell text from padding in what `encode_prompt` makes of B prompts: truth values `[B, L]`, true at text.

        For `joint_attention_kwargs={"attention_mask": …}` of a transformer whose adapter has positions or
        `mask_padding`. The length is the pipeline's own by default, as `encode_prompt`'s is.

        Raises:
            ValueError: if there is no text encoder for a prompt.
        """
        if not self.uses_generic_text_encoder:
            check_clip_encoders(self)
        return prompt_mask(self, prompt, prompt_2, prompt_3, max_sequence_length=max_sequence_length)

    def encode_latents(self, pixels: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Encode pictures into the latents that the transformer is trained on.

        Gradients flow; call under `torch.no_grad()` where they are not wanted.

        Args:
            pixels: `[B, 3, H, W]` in [-1, 1]; on the VAE's device unless the VAE is offloaded.
            generator: draws from the posterior of an `AutoencoderKL`.

        Returns:
            `(x - shift) · scale`, `[B, C, H / f, W / f]` with the VAE's scale factor f, in the VAE's dtype; without a
            VAE the pixels themselves.

        Raises:
            ValueError: if the pixels have another shape, or the latents are not finite.
        """
        self._check_pixels(pixels)
        return pixels if self.vae is None else encode_pixels(self.vae, pixels, generator=generator)

    def encode_posterior(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Encode pictures into the mean and the standard deviation of their latents, to be sampled later.

        Args:
            pixels: `[B, 3, H, W]` in [-1, 1]; on the VAE's device unless the VAE is offloaded.

        Returns:
            Two tensors in the shape and the units of `encode_latents`; the second is None without an `AutoencoderKL`.

        Raises:
            ValueError: if the pixels have another shape, or the latents are not finite.
        """
        self._check_pixels(pixels)
        return (pixels, None) if self.vae is None else encode_posterior(self.vae, pixels)

    def _check_pixels(self, pixels: Tensor) -> None:
        channels = self.transformer.config.in_channels if self.vae is None else self.vae.config.get("in_channels", 3)
        if pixels.ndim != 4 or pixels.shape[1] != channels:
            raise ValueError(f"pixels must have the shape [B, {channels}, H, W]; got {list(pixels.shape)}")

    def decode_latents(self, latents: Tensor) -> Tensor:
        """Decode latents into pictures.

        Args:
            latents: `[B, C, H / f, W / f]` as the transformer works on them, f the VAE's scale factor.

        Returns:
            Pixels `[B, 3, H, W]`, about in [-1, 1] and not clipped, in the VAE's dtype; without a VAE the latents.

        Raises:
            ValueError: if the latents, or the pixels that the VAE makes of them, are not finite.
        """
        check_finite(
            latents,
            "latents before decoding",
            f"denoising ran in {latents.dtype}. float16 overflows: load with dtype=torch.bfloat16 or float32. "
            "If it does in float32 too, the weights hold NaN or the guidance scale is far too high",
        )
        return latents if self.vae is None else decode_to_pixels(self.vae, latents)

    @property
    def uses_generic_text_encoder(self) -> bool:
        """Whether prompts go through one generic transformer rather than two CLIP encoders and T5."""
        return self.text_encoder is not None and not isinstance(unwrap(self.text_encoder), CLIPTextModelWithProjection)

    @property
    def max_sequence_length(self) -> int:
        """Longest text of T5, in tokens, where a call gives none.

        It is the one that the transformer's adapters were trained with, of several the largest, whether they are
        switched on or not; else the one that is stored in `model_index.json`; else diffusers' 256. A generic encoder's
        tokenizer cuts it to its `model_max_length`.
        """
        return default_length(self)

    @signature_of(StableDiffusion3Pipeline.encode_prompt)
    def encode_prompt(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """Encode prompts; arguments and results are those of `StableDiffusion3Pipeline.encode_prompt`.

        `max_sequence_length` is the pipeline's own by default.

        Returns:
            Embeddings `[B, L, D]` of prompt and negative prompt, then the pooled ones `[B, P]` of both, B counting
            each prompt `num_images_per_prompt` times.

        Raises:
            TypeError: if a negative prompt does not match its prompt.
            ValueError: if there is no text encoder for a prompt, or an argument has no use for the one there is.
        """
        call = self._bind(StableDiffusion3Pipeline.encode_prompt, args, kwargs)
        given = call.arguments
        guided = given["do_classifier_free_guidance"]
        if given["prompt_embeds"] is None or (guided and given["negative_prompt_embeds"] is None):
            if self.uses_generic_text_encoder:
                return encode_generically(self, given)
            check_clip_encoders(self)
        return super().encode_prompt(*call.args[1:], **call.kwargs)

    @signature_of(StableDiffusion3Pipeline.save_pretrained)
    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save a stock Stable Diffusion 3 folder, and the adapters, where there are any, in its `preproj/`.

        The arguments are those of `DiffusionPipeline.save_pretrained`; adapters have no variants and are always
        safetensors files; their names, scales and switches are kept. What an earlier save left in the folder never
        outlives this one. While the base is written the transformer is bare: no other thread may generate with it.

        Raises:
            ValueError: if `save_directory` is a file, an adapter is not finite, its name cannot be a folder's,
                or if the adapter was lost, as in `__call__`. Nothing is written then.
        """
        folder = Path(save_directory)
        if folder.is_file():
            raise ValueError(f"save_directory must be a folder; {folder} is a file")
        transformer = self.transformer  # None where it was left out
        if transformer is not None:
            self._check_adapter()
        # The adapters go first: the parent's last act is the upload, which must find the folder complete.
        if transformer is not None and is_patched(transformer):
            save_adapters(transformer, folder / ADAPTER_FOLDER)
        else:
            remove_adapters(folder / ADAPTER_FOLDER)
        with nullcontext() if transformer is None else detached(transformer):
            super().save_pretrained(os.fspath(save_directory), *args, **kwargs)

    @classmethod
    def from_pipe(cls, pipeline: Any, **kwargs: Any) -> PreProjSD3Pipeline:
        """Make a pipeline from another one's components, as they are: no adapter is looked for.

        The arguments are those of `DiffusionPipeline.from_pipe`, but without a `dtype` nothing is cast, to float32
        neither.
        """
        if not kwargs.keys() & {"dtype", "torch_dtype", "custom_pipeline"}:
            kwargs["dtype"] = _AS_THEY_ARE
        # The parent hands on where `pipeline` came from, which `register_to_config` would take for a load.
        nameless = copy.copy(pipeline)
        nameless._internal_dict = FrozenDict(
            {key: value for key, value in pipeline.config.items() if key != "_name_or_path"}
        )
        # A pipeline of another class may not know all of ours; hidden defaults look like components that are needed.
        absent = dict.fromkeys(set(cls._optional_components) - pipeline.components.keys())
        made = super().from_pipe(nameless, **(absent | kwargs))
        name = pipeline.config.get("_name_or_path")
        if name is not None:
            StableDiffusion3Pipeline.register_to_config(made, _name_or_path=name)
        return made

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Move or cast all components, as `DiffusionPipeline.to`."""
        # The last act of the parent's `from_pipe` is to cast the components that both pipelines share.
        return self if kwargs.get("dtype") is _AS_THEY_ARE else super().to(*args, **kwargs)

    def register_to_config(self, **kwargs: Any) -> None:
        """Note settings in the pipeline's config, and load the adapter once it is known where the base came from.

        Raises:
            FileNotFoundError: if the folder's adapter lacks a file.
            ValueError: if it is damaged, was made for another base, or cannot be fetched from the hub; or if the
                length of texts in `model_index.json` is none.
        """
        # The seam that every way of loading passes. `DiffusionPipeline.from_pretrained(custom_pipeline=…)` never calls
        # our from_pretrained; it makes the pipeline from its components and then, as its last act and with nothing
        # after it to return early, registers `_name_or_path`. __init__ is too early: it does not know the folder, and
        # `PreProjSD3Pipeline(**components)` must leave its components alone.
        super().register_to_config(**kwargs)
        source = kwargs.get("_name_or_path")
        length = None if source is None else stored_length(source, self.components)
        if length is not None:
            super().register_to_config(**{LENGTH_KEY: length})
        if source is not None and (self.transformer is None or not is_patched(self.transformer)):
            folder = find_adapter(source, self.components)
            if folder is not None:
                if self.transformer is not None:  # left out, as one does to encode prompts alone
                    load_adapters(self.transformer, folder)
                else:
                    self._adapter_length = saved_length(folder)
                self._adapter_origin = AdapterOrigin(self.transformer, folder)

    def to_json_string(self) -> str:
        """Write `model_index.json`, under the name of the stock class, so that stock diffusers loads the folder."""
        values = json.loads(super().to_json_string())
        values["_class_name"] = StableDiffusion3Pipeline.__name__
        return json.dumps(values, indent=2, sort_keys=True) + "\n"

    def _upload_folder(
        self,
        working_dir: str | os.PathLike[str],
        repo_id: str,
        token: str | None = None,
        commit_message: str | None = None,
        create_pr: bool = False,
        subfolder: str | None = None,
    ) -> Any:
        # The folder is asked, not the transformer, which is saved, and so uploaded, with its adapters taken off.
        check_upload(Path(working_dir), repo_id, subfolder=subfolder, token=token)
        return super()._upload_folder(
            working_dir,
            repo_id,
            token=token,
            commit_message=commit_message,
            create_pr=create_pr,
            subfolder=subfolder,
        )

    def _mask_padding(self, given: dict[str, Any]) -> None:
        """Add the mask of the prompts to a call's arguments, if an adapter may want one and the caller gives none.

        Whether it acts is decided at each step: a callback may change scales.
        """
        attention = given["joint_attention_kwargs"] or {}
        wanted = attention.get(MASK) is None and masks_padding(self.transformer, now=given["prompt"] is None)
        if wanted and (given["prompt_embeds"] is not None or isinstance(given["prompt"], (str, list))):
            given["joint_attention_kwargs"] = {**attention, PADDING: mask_of_call(self, given)}

    def _bind(
        self, parent: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> inspect.BoundArguments:
        """Name the arguments of a call as the parent's method does, and give it what was left out."""
        call = inspect.signature(parent).bind(self, *args, **kwargs)
        if call.arguments.get(LENGTH) is None:
            call.arguments[LENGTH] = self.max_sequence_length
        call.apply_defaults()
        return call

    def _check_adapter(self) -> None:
        check_intact(self.transformer)
        if self._adapter_origin is not None:
            self._adapter_origin.check(self.transformer)

    def _check_output_type(self, output_type: Any) -> None:
        if output_type not in OUTPUT_TYPES:
            raise ValueError(f"output_type must be one of {', '.join(map(repr, OUTPUT_TYPES))}; got {output_type!r}")
        channels = self.transformer.config.in_channels
        if self.vae is None and output_type != "latent" and channels not in (1, 3):
            raise ValueError(
                f"the transformer works on latents of {channels} channels, which are no picture without a VAE; load "
                'the pipeline with vae=…, or ask for output_type="latent"'
            )
