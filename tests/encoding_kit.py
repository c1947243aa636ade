"""Picture files in memory, and an encoder that keeps what it was asked, for tests of what is encoded."""

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mmpreproj.data.buckets import Size
from mmpreproj.data.caching import Encoding, encode_pictures
from mmpreproj.data.encoding import EncodedPictures
from mmpreproj.data.samples import look_at_pictures, plan_samples
from mmpreproj.data.sources.pictures import PictureSource, UnreadablePictureError
from mmpreproj.data.store import TensorStore

SQUARE = ((Size(8, 8),),)
ENCODING = Encoding(vae="a VAE", text="text encoders", max_sequence_length=12)


class Pictures(PictureSource):
    """Picture files by name; None in place of a file cannot be read."""

    def __init__(self, files: dict[str, bytes | None], captions: Sequence[str] | None = None) -> None:
        self.files, self.names = files, list(files)
        self.captions = list(captions or files)

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int) -> bytes:
        data = self.files[self.names[index]]
        if data is None:
            raise UnreadablePictureError(self.names[index], "it is gone")
        return data


class LetterEncoder:
    """An encoder whose embeddings spell the prompt and whose latents are pixels, and that keeps what it was asked.

    Args:
        deviation: of all latents; None for none.
        posterior: what maps pixels to mean and deviation in its place.
        before: called before each call, with how many pictures and prompts were encoded before it.
    """

    def __init__(
        self,
        deviation: float | None = 0.5,
        *,
        posterior: Callable[[Tensor], tuple[Tensor, Tensor | None]] | None = None,
        before: Callable[[int], None] = lambda done: None,
    ) -> None:
        self.deviation, self.posterior, self.before = deviation, posterior, before
        self.pictures: list[Tensor] = []
        self.batches: list[Tensor] = []
        self.prompts: list[str] = []
        self.settings: list[dict[str, Any]] = []

    def encode_posterior(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        self.before(len(self.pictures))
        self.pictures += list(pixels)
        self.batches.append(pixels)
        if self.posterior is not None:
            return self.posterior(pixels)
        mean = pixels[:, :2, ::2, ::2].to(torch.bfloat16)
        return mean, None if self.deviation is None else torch.full_like(mean, self.deviation)

    def encode_prompt(self, prompt: list[str], **settings: Any) -> tuple[Tensor, None, Tensor, None]:
        self.before(len(self.prompts))
        self.prompts += prompt
        self.settings.append(settings)
        tokens = torch.tensor([[ord(letter) for letter in text.ljust(12)] for text in prompt]).float()
        return tokens[..., None], None, tokens.sum(dim=1, keepdim=True), None

    def encode_prompt_mask(self, prompt: list[str], *, max_sequence_length: int) -> Tensor:
        return torch.tensor([[place < len(text) for place in range(12)] for text in prompt])


def spell(tokens: Tensor) -> str:
    """Read what `LetterEncoder` made of a prompt."""
    return "".join(chr(int(code)) for code in tokens.flatten()).rstrip()


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def shade(level: int, size: tuple[int, int] = (10, 8)) -> bytes:
    """Make a file of a grey picture, of a width and height."""
    return png(Image.new("RGB", size, (level,) * 3))


def noise(seed: int, size: tuple[int, int] = (16, 16)) -> bytes:
    """Make a file of a picture that is unlike its mirror image."""
    width, height = size
    return png(Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)))


def torn(seed: int = 0) -> bytes:
    """Make a file whose header can be read and whose picture cannot."""
    whole = noise(seed)
    return whole[: len(whole) // 2]


def encode(
    source: PictureSource,
    folder: Any,
    encoder: LetterEncoder | None = None,
    *,
    buckets: Sequence[Sequence[Size]] = SQUARE,
    encoding: Encoding = ENCODING,
    **settings: Any,
) -> EncodedPictures:
    """Look at a source's pictures and encode them into the store in a folder."""
    samples = plan_samples(look_at_pictures(source), buckets, names=source.names)
    store = TensorStore(folder)
    return encode_pictures(encoder or LetterEncoder(), source, samples, encoding=encoding, store=store, **settings)
