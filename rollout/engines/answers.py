"""The address that a server is asked at, and what its answer or its error says; for each kind of call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from rollout.engines.special_tokens import NO_SPECIAL_TOKENS, SpecialTokens

UNIX = "unix:"
"""A base URL is http://HOST:PORT, or this and the path of a Unix socket that a server listens on."""
LOOPBACK = "127.0.0.1"
GENERATE = "/inference/v1/generate"
"""The path at which vLLM takes pictures beside token ids, if it runs with --enable-scale-out."""
HOST_OF_SOCKET = "http://localhost"
"""What a request over a Unix socket says that it goes to."""
EXCERPT = 500
"""Characters of an answer that an error shows."""
WRONG_WEIGHTS = "it computes with other weights:"
"""What a server says that cannot prove its weights; tensors and sums follow, then a full stop."""


class EngineError(RuntimeError):
    """The engine failed: it is gone, does not answer in time, or answers with an error."""


class RequestRefused(EngineError):
    """The engine works but refuses this request (400, 413, 422), e.g. because its prompt is too long, or
    answers it alone with errors.
    """


class ContextFull(RequestRefused):
    """The prompt leaves no room in the engine's context."""


class ExpansionChanged(RequestRefused):
    """The engine makes other tokens of the pictures of a conversation than in its turn before."""


class AdapterMissing(EngineError):
    """The engine has no such adapter (404). An engine that has just restarted will get it soon."""


@dataclass(frozen=True)
class EngineFacts:
    """What those who ask an engine should know of it."""

    samples: int = 256
    """How many samples it generates at the same time, all its replicas together."""
    replicas: int = 1
    """How many copies of the model it has, each with a prefix cache of its own."""
    is_seeded: bool = True
    """Whether the seed of a request decides what is drawn. In vLLM the rest of the batch matters too, and the
    requests that have a seed are drawn one after the other: it gets none without engine.deterministic."""
    why_no_form: str = ""
    """The setting by which it may not be made to write a form (JSON): what is trained on its samples does not
    correct for tokens that the policy would not have chosen. Empty: it may."""
    routed_layers: tuple[int, ...] = ()
    """The layers of the model with experts, if it is asked which ones each token was routed to."""
    renders_pictures: bool = True
    """Whether it writes messages that show pictures as tokens, and takes pictures at /v1/completions. vLLM
    does neither: it gets them at GENERATE, and these messages are written without it."""
    special_tokens: SpecialTokens = NO_SPECIAL_TOKENS
    """The special tokens of the model that it serves."""
    placeholder: int = -1
    """The token that stands for a picture in what it is asked; -1: the model is shown none."""


def socket_of(base_url: str) -> str | None:
    """Return the path of the Unix socket in a base URL; None for one of TCP."""
    return base_url.removeprefix(UNIX) if base_url.startswith(UNIX) else None


def parse_answer(call: str, status: int, data: bytes) -> dict[str, Any]:
    """Return the JSON of an answer. Raises RequestRefused or another EngineError if it is an error or no
    JSON.
    """
    if status >= 400:
        kind = RequestRefused if status in (400, 413, 422) else EngineError
        raise kind(f"{call}: {status}: {excerpt(data)}")
    try:
        # Twice as fast as json.loads.
        answer = from_json(data.decode(errors="replace")) if data else {}
    except ValueError as error:
        raise EngineError(f"{call}: {status}, but no JSON: {excerpt(data)}") from error
    return answer if isinstance(answer, dict) else {"answer": answer}


def excerpt(data: bytes) -> str:
    """Return the beginning of what an answer says, in one line: the message if it is an error in JSON, as
    engines send it.
    """
    text = data.decode(errors="replace")
    try:
        error = from_json(text)
        error = error.get("error", error)
        text = str(error.get("message") or error.get("detail") or text)
    except (ValueError, AttributeError):
        pass  # it is no JSON, or of another form
    return " ".join(text[:EXCERPT].split())


def scoring_request(token_ids: Sequence[int], model: str | None = None) -> dict[str, Any]:
    """Return the body of a request for the logprobs of a prompt's tokens. `model`: the name of an adapter."""
    body = {"prompt": list(token_ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
    return body | ({} if model is None else {"model": model})


def prompt_logprobs(answer: Mapping[str, Any], token_ids: Sequence[int]) -> list[float]:
    """Natural logprobs, at temperature 1, of `token_ids[1:]`, each given all tokens before it, of an answer
    to `scoring_request`. Raises KeyError, IndexError, TypeError or ValueError if something is missing.
    """
    _first, *entries = answer["choices"][0]["prompt_logprobs"]
    pairs = zip(entries, token_ids[1:], strict=True)
    return [float(entry[str(token_id)]["logprob"]) for entry, token_id in pairs]
