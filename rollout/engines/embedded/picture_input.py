"""Show pictures to a model of transformers: its own processor reads each once, on the CPU.

Features take their places by where the sample says that a picture is, never by the ids of tokens: a policy
may write the placeholder itself.
"""

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollout.pictures import digest_of, open_picture

REMEMBERED_BYTES = 2**28
"""Of pixels, for the samples of a group and for the same picture in several microbatches."""


class PictureMismatch(ValueError):
    """What a sample says of a picture is not what the processor makes of it."""


@dataclass(frozen=True)
class Shown:
    """A picture as the model takes it."""

    token_ids: tuple[int, ...]
    """What its placeholder becomes."""
    features: tuple[int, ...]
    """Which of these tokens its features stand for."""
    pixels: Tensor
    """(1, channels, height, width), float32."""


class PictureReader:
    """The processor of one model. Used by one thread at a time."""

    def __init__(self, model_dir: str | os.PathLike[str]) -> None:
        """Load it from `model_dir`. It needs no torchvision, and where that is installed it is not used, so
        that all nodes compute the same.
        """
        from transformers import AutoProcessor

        self._processor: Any = AutoProcessor.from_pretrained(
            model_dir, local_files_only=True, trust_remote_code=False, backend="pil"
        )
        self.placeholder: int = self._processor.image_token_id
        self._remembered: OrderedDict[str, Shown] = OrderedDict()
        self._bytes = 0

    def read(self, data: bytes) -> Shown:
        """Return the picture of these bytes, which has been checked (rollout.pictures)."""
        digest = digest_of(data)
        if (shown := self.remembered(digest)) is not None:
            return shown
        shown = self._shown(open_picture(data))
        self._remembered[digest] = shown
        self._bytes += shown.pixels.nbytes
        while self._bytes > REMEMBERED_BYTES and len(self._remembered) > 1:
            self._bytes -= self._remembered.popitem(last=False)[1].pixels.nbytes
        return shown

    def _shown(self, picture: Any) -> Shown:
        inputs = self._processor(
            text=[self._processor.image_token],
            images=[picture],
            add_special_tokens=False,
            return_tensors="pt",
        )
        token_ids = tuple(inputs["input_ids"][0].tolist())
        features = tuple(k for k, token in enumerate(token_ids) if token == self.placeholder)
        return Shown(token_ids, features, inputs["pixel_values"])

    def remembered(self, digest: str) -> Shown | None:
        """Return a picture that has been read not long ago."""
        if digest in self._remembered:
            self._remembered.move_to_end(digest)
        return self._remembered.get(digest)

    def blank(self) -> Tensor:
        """Return pixels of no picture, as the model takes them."""
        from PIL import Image

        return torch.zeros_like(self._shown(Image.new("RGB", (64, 64))).pixels)

    def expanded(self, token_ids: Sequence[int], pictures: Sequence[Shown]) -> tuple[list[int], list[range]]:
        """Return the tokens with each placeholder as what its picture becomes, and where those tokens are.
        PictureMismatch if there are not as many placeholders as pictures.
        """
        if (count := list(token_ids).count(self.placeholder)) != len(pictures):
            raise PictureMismatch(f"{count} placeholders for {len(pictures)} pictures")
        waiting: Iterator[Shown] = iter(pictures)
        expanded, places = list[int](), list[range]()
        for token in token_ids:
            if token == self.placeholder:
                begin = len(expanded)
                expanded += next(waiting).token_ids
                places.append(range(begin, len(expanded)))
            else:
                expanded.append(token)
        return expanded, places


@dataclass(frozen=True)
class Placed:
    """Pictures, and where their features go in rows of tokens."""

    pixels: Tensor
    """(pictures, channels, height, width)"""
    places: Tensor
    """(N,) in the flattened rows."""
    sources: Tensor
    """(N,) the feature of each place, among those of all pictures one after the other."""


def placed(pictures: Sequence[tuple[Shown, int]]) -> Placed:
    """Return pictures with the places of their first tokens in the flattened rows. One that is there several
    times is computed once.
    """
    numbers: dict[int, int] = {}
    firsts, different, count = list[int](), list[Shown](), 0
    places, sources = list[int](), list[int]()
    for shown, begin in pictures:
        if id(shown) not in numbers:
            numbers[id(shown)] = len(different)
            different.append(shown)
            firsts.append(count)
            count += len(shown.features)
        first = firsts[numbers[id(shown)]]
        places += [begin + k for k in shown.features]
        sources += range(first, first + len(shown.features))
    pixels = torch.cat([shown.pixels for shown in different])
    return Placed(pixels, torch.tensor(places, dtype=torch.long), torch.tensor(sources, dtype=torch.long))


def picture_features(model: Any, pixels: Tensor) -> Tensor:
    """Return the features of pictures, one after the other: (features, hidden)."""
    output = model.get_image_features(pixel_values=pixels.to(model.device, model.dtype), return_dict=True)
    return torch.cat(list(output.pooler_output))


def put_in(embeddings: Tensor, features: Tensor, pictures: Placed) -> Tensor:
    """Return the embeddings (R, C, hidden) with the features in their places. Where there is no place, they
    are a part of the graph nevertheless.
    """
    flat, device = embeddings.flatten(0, 1), embeddings.device
    values = features[pictures.sources.to(features.device)].to(device, embeddings.dtype)
    return flat.index_copy(0, pictures.places.to(device), values).view_as(embeddings)
