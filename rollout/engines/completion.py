"""Completions in the OpenAI API with token ids, which vLLM and the embedded engine speak."""

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.engines.answers import RequestRefused
from rollout.engines.special_tokens import NO_SPECIAL_TOKENS, SpecialTokens
from rollout.origin import Sampling
from rollout.trajectory import Picture, Turn

_FINISH_REASONS = {
    **dict.fromkeys(("stop", "eos", "eos_token", "end_turn", "stop_sequence"), "stop"),
    **dict.fromkeys(("tool_calls", "function_call"), "stop"),
    **dict.fromkeys(("length", "max_tokens"), "length"),
}
"""What engines and agents say: it ended by itself, or it was cut."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool that the model has written."""

    id: str
    """The message with the result names it, as `tool_call_id`."""
    name: str
    arguments: dict[str, Any]

    @property
    def wire(self) -> dict[str, Any]:
        """The call as messages have it in the OpenAI API."""
        function = {"name": self.name, "arguments": json.dumps(self.arguments, ensure_ascii=False)}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True)
class Completion:
    """One completion. `logprobs`: natural, one for each of `token_ids`, in the distribution sampled from.
    `finish_reason`: `stop`, `length`, or one that no sample may have (see `finish_reason`).
    """

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str
    turns_before: Sequence[Turn] = ()
    """What the model was told since the completion before."""
    stop_string: str = ""
    """The stop string that ended it: its tokens are there, but `text` ends before it."""
    calls: Sequence[ToolCall] = ()
    """The tools that it calls, if it had some (Policy.with_tools)."""
    unread_calls: int | None = None
    """How many calls in the text could not be read, or name no tool; None if there are no tools."""
    content: str | None = None
    """If it calls tools: the text before the calls. `text` is all of it."""
    pictures: Sequence[Picture] = ()
    """The pictures of the prompt."""
    routes: NDArray[np.int16] | None = None
    """(tokens, layers x experts of a token) of prompt and completion but the last token, if asked for."""
    likely: Sequence[tuple[str, Mapping[str, float]]] = ()
    """If logprobs were asked for: the text of each token, and the likeliest ones there with logprobs."""


def asked_ids(token_ids: Sequence[int], pictures: Sequence[Picture], placeholder: int) -> list[int]:
    """Return tokens as an engine is asked: a placeholder alone for each picture."""
    short = list(token_ids)
    for picture in reversed(pictures):
        short[picture.begin : picture.end] = [placeholder]
    return short


def completion_request(
    prompt: str | Sequence[int], sampling: Sampling, special: SpecialTokens = NO_SPECIAL_TOKENS
) -> dict[str, Any]:
    """Return the body of a request for completions of a model with these special tokens."""
    return {
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "n": sampling.n,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop": list(sampling.stop),
        # vLLM takes only the tokenizer's end of sequence and those of generation_config.json by itself.
        "stop_token_ids": [*dict.fromkeys([*special.end_ids, *special.stop_ids(sampling.stop)])],
        "skip_special_tokens": not _shows_special(sampling, special),
        "seed": sampling.seed,
        "logprobs": 0,
        "return_token_ids": True,
        # vLLM takes missing values from the model's generation_config.json. Qwen2.5's has a
        # repetition penalty, so the logprobs would be of another policy than the trainer's.
        "repetition_penalty": 1.0,
        **sampling.more,
    }


_BESIDE = {"prompt", "content_parts", "model", "return_token_ids"}
"""What of a request is not about sampling."""


def generate_request(request: dict[str, Any]) -> dict[str, Any]:
    """Return the body for GENERATE that asks for the same as one for /v1/completions. RequestRefused for a
    form that it has not.
    """
    names = ("model", "return_token_ids")
    sampled = {name: value for name, value in request.items() if name not in _BESIDE}
    if (form := sampled.pop("response_format", None)) is not None:  # it would be ignored there
        sampled["structured_outputs"] = _structured(form)
    return {
        "token_ids": request["prompt"],
        # 0.32 reads `url` here, and not `image_url` as in a chat.
        "content_parts": [{"type": part["type"], **part["image_url"]} for part in request["content_parts"]],
        "output_mode": "text",
        "sampling_params": sampled,
        **{name: request[name] for name in names if name in request},
    }


def _structured(form: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = form.get("type")
    if kind == "json_schema":
        return {"json": form["json_schema"]["schema"]}
    if kind not in ("json_object", "text"):
        raise RequestRefused(f"response_format: {kind!r} is not supported for a prompt with pictures")
    return {"json_object": True} if kind == "json_object" else None


def generated_choices(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the choices of an answer of GENERATE, as /v1/completions has them. KeyError or TypeError if
    something is missing.
    """
    places = (answer["mm_placeholders"] or {}).get("image", ())
    of_all = {
        "prompt_token_ids": answer["prompt_token_ids"],
        "image_ranges": [(place["offset"], place["offset"] + place["length"]) for place in places],
    }
    return [
        choice | of_all | {"logprobs": _columns(choice["logprobs"]["content"])}
        for choice in answer["choices"]
    ]


def _columns(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [
            {each["token"]: each["logprob"] for each in entry["top_logprobs"]} for entry in entries
        ],
    }


def _shows_special(sampling: Sampling, special: SpecialTokens) -> bool:
    """Return whether the engine has to leave special tokens in the text, because it is searched for them."""
    stops = special.stop_ids(sampling.stop).values()
    return special.are_in(sampling.reasoning_end, *(text for text in sampling.stop if text not in stops))


def finish_reason(reason: str) -> str:
    """`stop` or `length` for what an engine says; what is neither (abort, content_filter) stays as it is."""
    return _FINISH_REASONS.get(reason, reason)


def whole_characters(text: str) -> str:
    """Return a text without the replacement characters at its end, which may be bytes of a character that the
    next tokens complete.
    """
    return text.rstrip("\N{REPLACEMENT CHARACTER}")


def completion_of(
    choice: dict[str, Any],
    sampling: Sampling,
    special: SpecialTokens = NO_SPECIAL_TOKENS,
    pictures: Sequence[str] = (),
    routed_layers: Sequence[int] = (),
) -> Completion:
    """Return one completion of an answer to `completion_request`. Its text has no special token but the end
    of the reasoning. `pictures`: the digests of those that the prompt shows. `routed_layers`: as EngineFacts
    has them. Raises KeyError, TypeError or
    ValueError if something is missing.
    """
    ranges = choice["image_ranges"] if pictures else ()
    token_ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    if not isinstance(token_ids, list) or not isinstance(logprobs, list):
        raise TypeError("token_ids and token_logprobs must be lists")
    text, stop = choice["text"], choice.get("stop_reason")
    if isinstance(stop, int):
        stop = special.stop_ids(sampling.stop).get(stop)
    if _shows_special(sampling, special):
        text = special.without(text, [sampling.reasoning_end or ""])
    return Completion(
        choice["prompt_token_ids"],
        token_ids,
        logprobs,
        text,
        finish_reason(str(choice["finish_reason"])),
        stop_string=stop or "",
        pictures=[Picture(digest, *map(int, at)) for digest, at in zip(pictures, ranges, strict=True)],
        routes=_routes(choice["routed_experts"], routed_layers) if routed_layers else None,
        likely=_likely(choice["logprobs"]) if "logprobs" in sampling.more else (),
    )


def _routes(text: str | None, layers: Sequence[int]) -> NDArray[np.int16]:
    """(tokens, layers x experts of a token), from an .npy in base64. vLLM has rows for all layers."""
    if text is None:
        raise ValueError("no routed_experts")
    routes = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    routes = routes if routes.shape[1] == len(layers) else routes[:, list(layers)]
    return routes.reshape(len(routes), -1).astype(np.int16)


def _likely(logprobs: dict[str, Any]) -> list[tuple[str, Mapping[str, float]]]:
    return list(zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))
