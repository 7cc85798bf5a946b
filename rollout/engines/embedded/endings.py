"""Find out what ends a row: the tokens and the texts after which a sample is finished."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from rollout.engines.embedded.batch import SampleInProgress
from rollout.engines.model_dir import PathLike
from rollout.engines.special_tokens import read_special_tokens


class Endings:
    """What ends the rows of one model. Used by one thread."""

    def __init__(self, model_dir: PathLike) -> None:
        # A tokenizer of its own, because two threads must not share one.
        self._tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        self._before = in_front(self._tokenizer)
        # The classes of transformers have defaults of other models where a configuration is silent.
        self._end_ids = {*read_special_tokens(Path(model_dir)).end_ids, self._tokenizer.eos_token_id}

    def finish_reason(self, row: SampleInProgress) -> str | None:
        """Return why the row ends with its last token, and note in the row what has stopped it; None: it
        goes on.
        """
        generation = row.generation
        if (last := row.token_ids[-1]) in self._end_ids:
            return "stop"
        if last in generation.stop_ids:
            row.stop_reason = last
        elif generation.stop:
            row.stop_reason = completed_stop_string(row, self._tokenizer, self._before)
        if row.stop_reason is not None:
            return "stop"
        return "length" if len(row.token_ids) >= generation.max_tokens else None


def in_front(tokenizer: Any) -> list[int]:
    """Return tokens to decode a text behind: many tokenizers leave out the space that a text begins with."""
    return tokenizer.encode("0", add_special_tokens=False)


def completed_stop_string(row: SampleInProgress, tokenizer: Any, before: list[int]) -> str | None:
    """Return the stop string that the last token has completed. `before`: see `in_front`."""
    # A token may be one byte of a UTF-8 character, so four tokens a character and a few for the
    # tokenizer's context are enough. Earlier steps have looked at earlier tokens.
    window = 4 * max(len(stop) for stop in row.generation.stop) + 4
    front, text = (
        tokenizer.decode([*before, *token_ids], skip_special_tokens=row.generation.skip_special)
        for token_ids in ([], row.token_ids[-window:])
    )
    return next((stop for stop in row.generation.stop if stop in text[len(front) :]), None)
