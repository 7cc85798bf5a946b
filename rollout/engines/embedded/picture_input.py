"""Show pictures to a model of transformers: its own processor reads each once, on the CPU, and its own
forward pass puts them among the tokens.

Which family it is does not matter: what a processor returns is handed to the model by its names, and trying
tells whether that works. Features take their places by where the sample says that a picture is, never by the
ids of tokens: a policy may write the placeholder itself.
"""

import functools
import inspect
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import pad

from rollout.engines.model_dir import PathLike
from rollout.engines.model_facts import feature_token
from rollout.pictures import digest_of, open_picture

REMEMBERED_BYTES = 2**28
"""Bytes of pixels that are kept, for the samples of a group and for a picture in several microbatches."""
_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels")
"""What processors return of the words."""
_TYPES = ("mm_token_type_ids", "token_type_ids")
"""Names under which a model is told of what kind each token is."""
BETWEEN = "a"
"""Stands between two pictures when a processor is tried: the line breaks that Gemma 3 has around each would
become one token."""


class PictureMismatch(ValueError):
    """What a sample says of a picture is not what the processor makes of it."""


@dataclass(frozen=True)
class ShownPicture:
    """A picture as the model takes it."""

    token_ids: tuple[int, ...]
    """What its placeholder becomes."""
    features: tuple[int, ...]
    """Which of these tokens its features stand for."""
    tensors: Mapping[str, Tensor]
    """Pixels and what else the model takes of it, by name; those of several pictures follow each other along
    the first dimension."""
    marks_answers: bool = False
    """Whether the model is told which tokens are the answer, and not which are pictures."""


class PictureReader:
    """The processor of one model. Used by one thread at a time."""

    def __init__(self, model_dir: PathLike) -> None:
        """Load it from `model_dir`. It needs no torchvision, and where that is installed it is not used, so
        that all nodes compute the same. Raises what transformers raises.
        """
        from transformers import AutoProcessor

        with _without_videos():
            self._processor: Any = AutoProcessor.from_pretrained(
                model_dir, local_files_only=True, trust_remote_code=False, backend="pil"
            )
        self.placeholder: int = self._processor.image_token_id
        """Stands for a picture in a prompt."""
        self._feature_token = feature_token(Path(model_dir))
        self._remembered: OrderedDict[str, ShownPicture] = OrderedDict()
        self._bytes = 0
        self._look_at_it()

    def _look_at_it(self) -> None:
        """Find out by two pictures what it adds to the words, and along which dimensions it joins tensors."""
        from PIL import Image

        single, double = (self._processed([Image.new("RGB", (64, 64))] * count) for count in (1, 2))
        lengths = [inputs["input_ids"].shape[1] for inputs in (single, double)]
        word = len(self._processor.tokenizer.encode(BETWEEN, add_special_tokens=False))
        self._added = 2 * lengths[0] + word - lengths[1]
        self._axes: dict[str, int] = {}
        for name, tensor in _tensors(single).items():
            axes = [k for k, size in enumerate(tensor.shape) if double[name].shape[k] == 2 * size > 0]
            if not axes:
                raise PictureMismatch(f"{name} of two pictures is {tuple(double[name].shape)}, as of one")
            self._axes[name] = axes[0]
        types = next((single[name] for name in _TYPES if name in single), None)
        self._marks_answers = types is not None and not bool(types.any())

    def _processed(self, pictures: Sequence[Any]) -> Mapping[str, Any]:
        return self._processor(
            text=[BETWEEN.join([self._processor.tokenizer.decode([self.placeholder])] * len(pictures))],
            images=[*pictures],
            add_special_tokens=False,
            return_tensors="pt",
        )

    def read(self, data: bytes) -> ShownPicture:
        """Return the picture of these bytes, which has been checked (rollout.pictures)."""
        digest = digest_of(data)
        if (shown := self.remembered(digest)) is not None:
            return shown
        shown = self.shown(open_picture(data))
        self._remembered[digest] = shown
        self._bytes += _bytes(shown)
        while self._bytes > REMEMBERED_BYTES and len(self._remembered) > 1:
            self._bytes -= _bytes(self._remembered.popitem(last=False)[1])
        return shown

    def shown(self, picture: Any) -> ShownPicture:
        """Return a picture of Pillow as the model takes it."""
        inputs = self._processed([picture])
        token_ids = inputs["input_ids"][0].tolist()
        token_ids = tuple(token_ids[: len(token_ids) - self._added])
        features = tuple(k for k, token in enumerate(token_ids) if token == self._feature_token)
        tensors = {name: tensor.movedim(self._axes[name], 0) for name, tensor in _tensors(inputs).items()}
        return ShownPicture(token_ids, features, tensors, self._marks_answers)

    @functools.cached_property
    def example(self) -> ShownPicture:
        """A picture to try the model with."""
        from PIL import Image

        return self.shown(Image.linear_gradient("L").resize((64, 48)).convert("RGB"))

    def remembered(self, digest: str) -> ShownPicture | None:
        """Return a picture that has been read not long ago."""
        if digest in self._remembered:
            self._remembered.move_to_end(digest)
        return self._remembered.get(digest)

    def expanded(
        self, token_ids: Sequence[int], pictures: Sequence[ShownPicture]
    ) -> tuple[list[int], list[range]]:
        """Return the tokens with each placeholder as what its picture becomes, and where those tokens are.
        PictureMismatch if there are not as many placeholders as pictures.
        """
        if (count := list(token_ids).count(self.placeholder)) != len(pictures):
            raise PictureMismatch(f"{count} placeholders for {len(pictures)} pictures")
        waiting: Iterator[ShownPicture] = iter(pictures)
        expanded, places = list[int](), list[range]()
        for token in token_ids:
            if token == self.placeholder:
                begin = len(expanded)
                expanded += next(waiting).token_ids
                places.append(range(begin, len(expanded)))
            else:
                expanded.append(token)
        return expanded, places


@contextmanager
def _without_videos() -> Iterator[None]:
    """Let a second image processor stand in for that of videos, which torchvision would be needed for."""
    from transformers import processing_utils

    automatic: Any = processing_utils.MODALITY_TO_AUTOPROCESSOR_MAPPING
    classes: Any = processing_utils.MODALITY_TO_BASE_CLASS_MAPPING
    image, video = "image_processor", "video_processor"
    with (
        patch.dict(automatic._MAPPING_NAMES, {video: automatic._MAPPING_NAMES[image]}),
        patch.dict(classes, {video: classes[image]}),
    ):
        yield


def _tensors(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in inputs.items() if name not in _OF_TEXT and torch.is_tensor(value)}


def _bytes(shown: ShownPicture) -> int:
    return sum(tensor.nbytes for tensor in shown.tensors.values())


@dataclass(frozen=True)
class PlacedPictures:
    """Pictures in rows of tokens, in the order of their places."""

    pictures: Sequence[tuple[ShownPicture, int]]
    """Each with the place of its first token in the flattened rows."""
    segments: Tensor | None = None
    """(2, rows, columns): see Microbatch; None: a sequence begins where the position is 0."""
    answers: Tensor | None = None
    """(rows, columns) where tokens are no prompt; None: nowhere."""
    blank: ShownPicture | None = None
    """A picture for rows without any, which has no place: if the layers are sharded, all ranks gather those
    that look at pictures."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What the model takes of all pictures, by name."""
        names = self.pictures[0][0].tensors
        return {name: _joined([shown.tensors[name] for shown, _ in self.pictures]) for name in names}

    def is_place(self, shape: Sequence[int]) -> Tensor:
        """(rows, columns) where features go."""
        places = [begin + k for shown, begin in self.pictures for k in shown.features]
        is_place = torch.zeros(*shape, dtype=torch.bool)
        is_place.view(-1)[torch.tensor(places, dtype=torch.long)] = True
        return is_place


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors one behind the other, the smaller ones with zeros behind, as processors pad them."""
    sizes = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    return torch.cat([
        pad(tensor, [k for size, most in zip(tensor.shape[:0:-1], sizes[::-1], strict=True)
                     for k in (0, most - size)])
        for tensor in tensors
    ])  # fmt: skip


def picture_tensors(shown: Mapping[str, Tensor], device: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return tensors of pictures where the model computes, and in its number type."""
    return {
        name: tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in shown.items()
    }


@contextmanager
def with_pictures(
    model: Any, inputs: Mapping[str, Any], pictures: PlacedPictures, dtype: torch.dtype
) -> Iterator[dict[str, Any]]:
    """Give what the whole model takes of rows with pictures, from what its decoder takes of the rows. Inside,
    a placeholder elsewhere is embedded as any token. `model`: what has the towers and the decoder.
    """
    if not pictures.pictures:
        positions = {name: spread_positions(model, inputs[name]) for name in inputs if name == "position_ids"}
        yield {**inputs, **positions}
        return
    ids, device = inputs["input_ids"], inputs["input_ids"].device
    shown = pictures.pictures[0][0]
    token = shown.token_ids[shown.features[0]]
    is_place = pictures.is_place(ids.shape).to(device)
    written = (ids == token) & ~is_place
    types = is_place
    if shown.marks_answers:
        answers = (
            is_place & False if pictures.answers is None else pictures.answers.to(device).view(ids.shape)
        )
        types = answers | ~is_place.any(1, keepdim=True)
    parameters = inspect.signature(model.forward).parameters
    hook = model.get_input_embeddings().register_forward_pre_hook(
        lambda _, args: (torch.where(written, token, args[0]), *args[1:])
    )
    try:
        yield {
            **inputs,
            "input_ids": ids.masked_fill(written, 0 if token else 1),
            "position_ids": spread_positions(model, inputs["position_ids"], pictures),
            **{name: types.long() for name in _TYPES if name in parameters},
            **picture_tensors(pictures.tensors, device, dtype),
        }
    finally:
        hook.remove()


def spread_positions(model: Any, position_ids: Tensor, pictures: PlacedPictures | None = None) -> Tensor:
    """Return the positions (rows, columns) as the model takes them: if it has several for each token, (1 + 3,
    rows, columns), the first of which keep sequences apart. A picture takes as many as it is wide or high.
    """
    if not hasattr(model, "get_rope_index"):
        return position_ids
    spread = position_ids.repeat(3, 1, 1)
    flat, (rows, columns) = spread.view(3, -1), position_ids.shape
    numbers = (position_ids == 0).cumsum(1)
    segments = torch.stack([numbers, numbers])
    if pictures is not None and pictures.segments is not None:
        segments = pictures.segments.to(position_ids.device).view(2, rows, columns)
    for shown, begin in pictures.pictures if pictures is not None else ():
        end, row = begin + len(shown.token_ids), begin // columns
        inside = _own_positions(model, shown).to(position_ids.device)
        flat[:, begin:end] = flat[:, begin : begin + 1] + inside
        segment = segments[0, row, begin % columns]
        is_behind = (segments[:, row] == segment).any(0)
        is_behind[: end - row * columns] = False
        spread[:, row, is_behind] += int(inside.max()) + 1 - len(shown.token_ids)
    return torch.cat([position_ids[None], spread])


def _own_positions(model: Any, shown: ShownPicture) -> Tensor:
    """Return the positions of a picture's tokens, (3, tokens), if it stands first."""
    types = torch.zeros(1, len(shown.token_ids), dtype=torch.long)
    types[0, list(shown.features)] = 1
    parameters = inspect.signature(model.get_rope_index).parameters
    grids = {name: tensor for name, tensor in shown.tensors.items() if name in parameters}
    ids = torch.tensor([shown.token_ids])
    return model.get_rope_index(input_ids=ids, mm_token_type_ids=types, **grids)[0][:, 0]
