"""Requests and answers of the embedded engine's server, in the shapes of vLLM 0.32. No torch."""

import base64
import io
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, StrictBool, StrictInt, StrictStr

from rollout.engines.bodies import BadRequest, Body, GenerationBody
from rollout.pictures import check_picture

MAX_N = 16384
"""The most completions of one request."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "min_tokens": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "ignore_eos": (False,),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
}
"""Fields that are not implemented: the values (beside null) that change nothing."""


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: StrictStr | list[StrictInt] | list[StrictStr] | list[list[StrictInt]]
    n: StrictInt = Field(1, ge=1, le=MAX_N)
    max_tokens: StrictInt | None = Field(16, ge=1)
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False, strict=True)
    top_p: float | None = Field(None, gt=0, le=1, strict=True)
    top_k: StrictInt | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1, strict=True)
    seed: StrictInt | None = Field(None, ge=-(2**63), lt=2**63)
    logprobs: StrictInt | None = None
    prompt_logprobs: StrictInt | None = None
    return_token_ids: StrictBool | None = None
    return_routed_experts: StrictBool = False
    """Answered as by a vLLM that is started with --enable-return-routed-experts."""
    stop_token_ids: list[StrictInt] | None = None
    skip_special_tokens: StrictBool = True
    add_special_tokens: StrictBool = True
    content_parts: tuple[dict[str, Any], ...] = ()
    """Pictures of the prompt, one for each placeholder in it, as in vLLM's /inference/v1/generate."""

    def prompts(self, encode: Callable[[str], list[int]]) -> list[list[int]]:
        """Return the token ids of each prompt."""
        if isinstance(self.prompt, str):
            return [encode(self.prompt)]
        if self.prompt and isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        prompts: Any = self.prompt  # for the type checker a union of lists, in fact a list of either
        return [encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]


class TokenizeBody(Body):
    """POST /tokenize: a text or chat messages."""

    prompt: StrictStr | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: StrictBool | None = None
    add_generation_prompt: StrictBool = True
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: list[Annotated[StrictInt, Field(ge=0, lt=2**31)]]


class RpcArguments(BaseModel, extra="forbid"):
    """`weights_path` of reload_weights; `path` and `adapter` of prove_content. All are directories."""

    weights_path: StrictStr | None = None
    path: StrictStr | None = None
    adapter: StrictStr | None = None


class RpcBody(Body):
    """POST /collective_rpc."""

    method: Literal["reload_weights", "prove_content"]
    kwargs: RpcArguments = RpcArguments()


class AdapterBody(Body):
    """POST /v1/load_lora_adapter: the adapter replaces the earlier one, which may have another name."""

    lora_name: StrictStr = Field(min_length=1)
    lora_path: StrictStr = Field(min_length=1)


class VersionBody(Body):
    """POST /update_weight_version."""

    new_version: StrictStr


def check_completion(body: CompletionBody) -> None:
    """Raise BadRequest if the request needs something that is not implemented."""
    for name, neutral in _NEUTRAL.items():
        value = (body.model_extra or {}).get(name)
        if value is not None and value not in neutral:
            raise BadRequest(f"{name}: {value!r} is not supported by the embedded engine")
    for name in ("response_format", "structured_outputs"):
        if (body.model_extra or {}).get(name) not in (None, {"type": "text"}):
            raise BadRequest(
                f"{name}: the embedded engine has no grammar; ask for the form in the messages, or use vLLM"
            )
    if not body.prompt:
        raise BadRequest("prompt: must not be empty")
    for name, value in (("logprobs", body.logprobs), ("prompt_logprobs", body.prompt_logprobs)):
        if value not in (None, 0):
            raise BadRequest(f"{name}: only 0 (the token's own) is supported by the embedded engine")
    if "" in body.stop_strings:
        raise BadRequest("stop: a stop string must not be empty")


def pictures_of(body: CompletionBody) -> list[bytes]:
    """Return the pictures of a request. Raises BadRequest if they are none, or if it asks for more than
    completions of one prompt of token ids.
    """
    pictures: list[bytes] = []
    try:
        for part in body.content_parts:
            head, comma, text = part["image_url"]["url"].partition(";base64,")
            if part["type"] != "image_url" or not comma or not head.startswith("data:image/"):
                raise ValueError(head[:40])
            pictures.append(base64.b64decode(text, validate=True))
            check_picture(pictures[-1])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise BadRequest(f"content_parts: must be pictures as data URIs of image_url: {error}") from error
    is_ids = isinstance(body.prompt, list) and all(isinstance(token, int) for token in body.prompt)
    if pictures and not is_ids:
        raise BadRequest("content_parts: need one prompt, of token ids")
    if pictures and body.prompt_logprobs is not None:
        raise BadRequest("prompt_logprobs: not of a prompt with pictures")
    return pictures


def check_prompt(
    prompt_ids: Sequence[int], max_tokens: int | None, *, vocab_size: int, max_model_len: int
) -> int:
    """Return the number of tokens to generate. Raises BadRequest if the prompt is invalid, or too long for
    them.
    """
    if not prompt_ids:
        raise BadRequest("prompt: must not be empty")
    if min(prompt_ids) < 0 or max(prompt_ids) >= vocab_size:
        raise BadRequest(f"prompt: token ids must lie in [0, {vocab_size})")
    room = max_model_len - len(prompt_ids)
    tokens = room if max_tokens is None else max_tokens
    if tokens > room or room < 1:
        raise BadRequest(
            f"prompt: {len(prompt_ids)} tokens and max_tokens {tokens} exceed the context of {max_model_len}"
        )
    return tokens


def new_seed() -> int:
    return secrets.randbits(62)


def completion_body(
    model: str, choices: list[dict[str, Any]], prompt_tokens: int, completion_tokens: int
) -> dict[str, Any]:
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": index, **choice} for index, choice in enumerate(choices)],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }


def logprobs_body(texts: Sequence[str], logprobs: Sequence[float]) -> dict[str, Any]:
    """`logprobs` of a choice; `texts` are the texts of its tokens."""
    return {
        "text_offset": list(accumulate(map(len, texts), initial=0))[:-1],
        "token_logprobs": logprobs,
        "tokens": texts,
        "top_logprobs": [{text: logprob} for text, logprob in zip(texts, logprobs, strict=True)],
    }


def prompt_logprobs_body(
    token_ids: Sequence[int], texts: Sequence[str], logprobs: Sequence[float]
) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` of a choice; `logprobs` are of all tokens of its prompt but the first."""
    entries = zip(token_ids[1:], texts[1:], logprobs, strict=True)
    return [
        None,
        *({str(token): {"logprob": logprob, "decoded_token": text}} for token, text, logprob in entries),
    ]


def routes_body(routes: Sequence[NDArray[np.int16]]) -> str | None:
    """`routed_experts` of a choice; None without any."""
    if not routes:
        return None
    data = io.BytesIO()
    np.save(data, np.concatenate(routes), allow_pickle=False)
    return base64.b64encode(data.getbuffer()).decode()


def model_list(name: str, adapter: str | None, max_model_len: int) -> dict[str, Any]:
    """List the model, and the adapter that is merged into it."""
    card = {"object": "model", "created": int(time.time()), "owned_by": "flagpost", "root": name}
    cards = [{"id": name, **card, "parent": None, "max_model_len": max_model_len}]
    if adapter is not None:
        cards.append({**cards[0], "id": adapter, "parent": name})
    return {"object": "list", "data": cards}
