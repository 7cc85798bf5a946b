"""Read the pictures of microbatches: each rank makes tensors of the files, by the model's own processor."""

from operator import itemgetter
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.engines.embedded.picture_input import PictureReader, PlacedPictures, ShownPicture
from rollout.pictures import digest_of
from rollout.storage import files
from trainer.batch.packing import Microbatch

EXAMPLE = "example"


class PictureFault(ValueError):
    """A picture of the batch is missing or altered, or is not what its samples were made with."""


class RunPictures:
    """The directory of a run's pictures, and the processor that reads them."""

    def __init__(self, model_dir: Path, images_dir: Path) -> None:
        self._reader = PictureReader(model_dir)
        self._images_dir = images_dir
        self.example = self._reader.example
        """A picture that batches call EXAMPLE, to try the model with."""

    def placed(self, microbatch: Microbatch) -> PlacedPictures:
        """Return the pictures of a microbatch. Raises PictureFault."""
        shown = [
            (self._shown(digest, microbatch.token_ids.reshape(-1)[begin : begin + count].tolist()), begin)
            for digest, begin, count in sorted(microbatch.pictures or (), key=itemgetter(1))
        ]
        if not shown:
            return PlacedPictures((), blank=self.example)
        segments = None if microbatch.segments is None else torch.from_numpy(microbatch.segments)
        return PlacedPictures(shown, segments, torch.from_numpy(_answers(microbatch)))

    def _shown(self, digest: str, token_ids: list[int]) -> ShownPicture:
        path = self._images_dir / digest
        shown = self.example if digest == EXAMPLE else self._reader.remembered(digest)
        if shown is None:
            try:
                data = files.read(path)
            except FileNotFoundError as error:
                raise PictureFault(f"{path}: this picture of the batch is missing; bring it back") from error
            if digest_of(data) != digest:
                raise PictureFault(f"{path}: this picture has changed since samples were made of it")
            shown = self._reader.read(data)
        if list(shown.token_ids) != token_ids:
            raise PictureFault(
                f"{path}: the processor makes {len(shown.token_ids)} tokens of it, and the samples have "
                f"{len(token_ids)} others: all nodes need the same transformers"
            )
        return shown


def _answers(microbatch: Microbatch) -> NDArray[np.bool_]:
    """(R, C) where tokens are no prompt, if a row holds one sequence."""
    rows, columns = microbatch.token_ids.shape
    last = np.full(rows, columns)
    np.minimum.at(last, microbatch.scored_at // columns, microbatch.scored_at % columns)
    return np.arange(columns) > last[:, None]
