"""A teacher: a server with a larger model, which says how likely it finds the tokens that the policy sampled.

rollout.teacher=http://HOST:PORT/v1,model=NAME
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.rewards.endpoint import Endpoint
from rollout.rewards.served import CONNECTION, connect, parse
from rollout.trajectory import Sample

_EXCERPT = 60
_REPLACED = "\ufffd"
"""What stands for a token that is a part of a character."""


class Teacher:
    """Asks an OpenAI-compatible completions server, such as vLLM, for `prompt_logprobs`."""

    def __init__(self, name: str) -> None:
        """`name`: the setting rollout.teacher. Raises ValueError, in one line, for one that is wrong."""
        url, parameters = parse(name, {**CONNECTION, "model": str})
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

    async def close(self) -> None:
        """Close the connections."""
        await self._endpoint.close()


def _check_text(tokens: Sequence[str], sample: Sample) -> None:
    """Raise ValueError if the teacher reads the sample's tokens as another text than the policy's tokenizer.

    Spaces do not count: some tokenizers drop them from a token that stands alone. The teacher's text may have
    more in between: special tokens, which the sample's text leaves out.
    """
    theirs, ours = ("".join(text.split()) for text in ("".join(tokens), sample.text))
    rest = iter(theirs)
    if (
        sample.turns
        or _REPLACED in theirs
        or not ours.isascii()
        or all(character in rest for character in ours)
    ):
        return
    raise ValueError(
        f"the teacher reads the tokens of {ours:.{_EXCERPT}} as {theirs:.{_EXCERPT}}; a teacher needs the "
        "tokenizer of the policy"
    )
