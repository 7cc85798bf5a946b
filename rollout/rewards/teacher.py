"""A teacher: a server with a larger model, which says how likely it finds the tokens that the policy sampled.

rollout.teacher=http://HOST:PORT/v1,model=NAME
"""

import asyncio
import contextlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.rewards.endpoint import Endpoint
from rollout.rewards.served import CONNECTION, LOOK_S, connect, parse
from rollout.trajectory import Sample

_EXCERPT = 60
_REFUSALS = {400, 401, 404, 422}
"""Answers of a server that has read what it was asked, and would answer the same again."""
_REPLACED = "\ufffd"
"""What stands for a token that is a part of a character."""


class Teacher:
    """Asks an OpenAI-compatible completions server, such as vLLM, for `prompt_logprobs`."""

    def __init__(self, name: str) -> None:
        """`name`: the setting rollout.teacher. Raises ValueError, in one line, for one that is wrong."""
        url, parameters = parse(name, {**CONNECTION, "model": str})
        self._models = f"{url.rstrip('/')}/models"
        self._endpoint: Endpoint = connect(f"{url.rstrip('/')}/completions", parameters, cache=0)
        self._asked = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        if "model" in parameters:
            self._asked["model"] = parameters["model"]

    async def logprobs(self, sample: Sample) -> NDArray[np.float32]:
        """(T,) the teacher's logprob of each trained token of a sample, natural log, at temperature 1; 0
        where a token is not trained. Raises EndpointError.
        """
        ids = sample.token_ids.tolist()
        trained = np.flatnonzero(sample.loss_mask).tolist()

        def read(answer: Any) -> NDArray[np.float32]:
            logprobs = np.zeros(len(ids), np.float32)
            try:
                entries = answer["choices"][0]["prompt_logprobs"]
                entries_of_trained = [entries[place][str(ids[place])] for place in trained]
                logprobs[trained] = [float(entry["logprob"]) for entry in entries_of_trained]
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise ValueError(
                    f"answered without the logprobs of all {len(ids)} tokens ({error!r}); a teacher is a "
                    f"server that takes `prompt_logprobs`, as vLLM does: {answer!s:.200}"
                ) from None
            if not np.isfinite(logprobs).all():
                raise ValueError("a logprob is not a finite number")
            _check_text(
                [str(entry.get("decoded_token") or _REPLACED) for entry in entries_of_trained], sample
            )
            return logprobs

        return await self._endpoint.ask({**self._asked, "prompt": ids}, read)

    async def longest(self, largest: int) -> int | None:
        """Return how many tokens a sample may have for the teacher; None if it does not say, or does not
        answer now. Raises ValueError if it refuses `largest`, the largest token that any sample may have.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                question = {**self._asked, "prompt": [largest, largest]}
                answer = await self._endpoint.look(self._endpoint.url, question)
                if answer is not None and answer[0] in _REFUSALS:
                    status, text = answer
                    raise ValueError(
                        f"answered {status} to a sample with {largest}, the largest of the tokens that words "
                        f"and ends of the policy's samples may have: {' '.join(text.split()):.200}; give a "
                        "teacher with the policy's tokenizer, or mend its address, model's name or key"
                    )
                cards = await self._endpoint.look(self._models) if answer is not None else None
                with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                    return _longest(json.loads(cards[1] if cards else ""), self._asked.get("model"))
        return None

    async def close(self) -> None:
        """Close the connections."""
        await self._endpoint.close()


def _longest(models: Any, name: str | None) -> int | None:
    """Return the tokens that the model `name` reads, with room for the one that it is made to write."""
    cards = [card for card in models["data"] if name in (None, card["id"])]
    lengths = [card["max_model_len"] for card in cards if type(card.get("max_model_len")) is int]
    return max(lengths) - 1 if lengths else None


def _check_text(tokens: Sequence[str], sample: Sample) -> None:
    """Raise ValueError if the teacher reads the sample's tokens as another text than the policy's tokenizer.

    Spaces do not count: some tokenizers drop them from a token that stands alone. The teacher's text may have
    more in between: special tokens, which the sample's text leaves out.
    """
    read_text, sample_text = ("".join(text.split()) for text in ("".join(tokens), sample.text))
    remaining = iter(read_text)
    if (
        sample.turns
        or _REPLACED in read_text
        or not sample_text.isascii()
        or all(character in remaining for character in sample_text)
    ):
        return
    raise ValueError(
        f"the teacher reads the tokens of {sample_text:.{_EXCERPT}} as {read_text:.{_EXCERPT}}; a teacher "
        "needs the tokenizer of the policy"
    )
