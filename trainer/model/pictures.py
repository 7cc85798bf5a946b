"""Read the pictures of microbatches: each rank makes tensors of the files, by the model's own processor."""

from pathlib import Path

import torch

from rollout.engines.embedded.picture_input import PictureReader, Placed, Shown, placed
from rollout.pictures import digest_of
from rollout.storage import files
from trainer.batch.packing import Microbatch


class PictureFault(ValueError):
    """A picture of the batch is missing or altered, or is not what its samples were made with."""


class Pictures:
    """The directory of a run's pictures, and the processor that reads them."""

    def __init__(self, model_dir: Path, images_dir: Path) -> None:
        self._reader = PictureReader(model_dir)
        self._images_dir = images_dir

    def placed(self, microbatch: Microbatch) -> Placed:
        """Return the pictures of a microbatch. One without any gets a blank one that has no place: if the
        layers are sharded, all ranks gather those that look at pictures. Raises PictureFault.
        """
        shown = [
            (self._shown(digest, microbatch.token_ids.reshape(-1)[begin : begin + count].tolist()), begin)
            for digest, begin, count in microbatch.pictures or ()
        ]
        if shown:
            return placed(shown)
        nowhere = torch.zeros(0, dtype=torch.long)
        return Placed(self._reader.blank(), nowhere, nowhere)

    def _shown(self, digest: str, token_ids: list[int]) -> Shown:
        path = self._images_dir / digest
        shown = self._reader.remembered(digest)
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
