"""Put the pictures of a request into its prompt, or say why the served model is shown none."""

import threading
from pathlib import Path

from rollout.engines.bodies import BadRequest
from rollout.engines.embedded.engine import EmbeddedEngine
from rollout.engines.embedded.picture_input import PictureMismatch, PictureReader, ShownPicture
from rollout.engines.embedded.protocol import CompletionBody, pictures_of
from rollout.engines.model_facts import has_processor, takes_pictures

_SAID = 300
"""Characters of a library's error that are said."""


class PicturesOfRequests:
    """The processor of an engine's model, loaded with the first picture. Any thread may use it."""

    def __init__(self, engine: EmbeddedEngine, model_dir: str) -> None:
        """`model_dir`: what messages call the model."""
        self._engine = engine
        self._model_dir = model_dir
        self._reader: PictureReader | None = None
        self._lock = threading.Lock()

    def shown(
        self, prompt_ids: list[int], body: CompletionBody
    ) -> tuple[list[int], list[tuple[ShownPicture, int]]]:
        """Return the prompt with its pictures' tokens, and each picture with the place of its first token."""
        pictures = pictures_of(body)
        with self._lock:
            reader = self._reader_of_model()
            shown = [reader.read(data) for data in pictures]
            try:
                expanded, places = reader.expanded(prompt_ids, shown)
            except PictureMismatch as error:
                raise BadRequest(f"content_parts: {error}") from error
        return expanded, [(picture, place.start) for picture, place in zip(shown, places, strict=True)]

    def _reader_of_model(self) -> PictureReader:
        """Return the processor of the model that is served. BadRequest if that is shown no pictures."""
        served, reason = Path(self._engine.model_dir), ""
        if self._reader is None and not (takes_pictures(served) and has_processor(served)):
            reason = "it has no part for them, or no processor"
        elif self._reader is None:
            try:
                self._reader = PictureReader(served)
            except Exception as error:  # of files, of a missing library
                reason = " ".join(f"its processor cannot be loaded: {error}".split())[:_SAID]
        reason = reason or (self._reader and self._engine.why_no_pictures(self._reader.example).result())
        if self._reader is None or reason:
            raise BadRequest(f"content_parts: {self._model_dir} is shown no pictures here: {reason}")
        return self._reader
