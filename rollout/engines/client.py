"""The client that asks a server for completions, vLLM or the embedded engine."""

import asyncio
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollout.engines import appended_text
from rollout.engines.answers import (
    EXCERPT,
    GENERATE,
    ContextFull,
    EngineError,
    EngineFacts,
    RequestRefused,
    prompt_logprobs,
    scoring_request,
)
from rollout.engines.completion import (
    Completion,
    completion_of,
    completion_request,
    generate_request,
    generated_choices,
)
from rollout.engines.connection import Connection
from rollout.origin import Sampling
from rollout.pictures import digest_of, image_url, pictures_in
from rollout.storage import files
from rollout.trajectory import Picture

_SPECIAL_TOKENS = 16
"""More than a tokenizer adds to a text."""


class EngineClient(Connection):
    """Asks for completions, tokens and logprobs."""

    facts = EngineFacts()

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        request_timeout_s: float = 1800.0,
        retry_s: float = 10.0,
        facts: EngineFacts = facts,
        images: Path | None = None,
        renderer: "EngineClient | None" = None,
    ) -> None:
        """`model`: the adapter to ask (rollout.engines.admin.adapter_name); None: the model itself. `images`:
        the directory of the run's pictures. `renderer`: what writes messages that show pictures as tokens, if
        the engine does not (EngineFacts.renders_pictures).
        """
        super().__init__(base_url, model, request_timeout_s, retry_s)
        self._renderer = renderer
        self.images = images
        self.facts = facts
        self._in_flight = Counter[int]()
        """How many samples of groups each replica has."""
        self._tokenizer_facts: dict[str, bool] = {}
        self._context: int | None = None
        """The engine's context in tokens, read when it first refuses a request; 0: it does not say."""

    async def generate(
        self, prompt: str | Sequence[int], sampling: Sampling, pictures: Sequence[str] = ()
    ) -> list[Completion]:
        """Return the `sampling.n` completions of a prompt (text, or token ids that are taken as they are),
        which end where the engine's context does. `pictures`: the digests of those that the prompt has a
        placeholder for.

        Raises RequestRefused, e.g. if the prompt alone fills the context, or another EngineError.
        """
        if pictures:  # the engine cuts the completions itself: it alone knows how many tokens a picture has
            return await self._complete(prompt, sampling, pictures)
        known = self._context  # now: another request may read it while this one is refused
        try:
            return await self._complete(*await self._fitted(prompt, sampling))
        except RequestRefused:
            if known is None and self._context is None:
                self._context = await self._read_context()  # it may have been asked for more than fits
            if known is not None or not self._context:
                raise
            return await self._complete(*await self._fitted(prompt, sampling))

    async def _fitted(
        self, prompt: str | Sequence[int], sampling: Sampling
    ) -> tuple[str | Sequence[int], Sampling]:
        """Return the request with at most the tokens that the context has left, once the context is known."""
        if not self._context:
            return prompt, sampling
        if isinstance(prompt, str):
            if len(prompt.encode()) + _SPECIAL_TOKENS + sampling.max_tokens <= self._context:
                return prompt, sampling  # a token has a byte at least
            prompt = await self.tokenize_whole(prompt)
        room = self._context - len(prompt)
        if room < 1:
            raise ContextFull(
                f"a prompt of {len(prompt)} tokens fills the engine's context of {self._context}"
            )
        return prompt, replace(sampling, max_tokens=min(sampling.max_tokens, room))

    async def _complete(
        self, prompt: str | Sequence[int], sampling: Sampling, pictures: Sequence[str] = ()
    ) -> list[Completion]:
        special_tokens = self.facts.special_tokens
        request = completion_request(prompt, sampling, special_tokens)
        if pictures:
            request["content_parts"] = [await asyncio.to_thread(self._part, digest) for digest in pictures]
        if not self.facts.is_seeded:
            request["seed"] = None
        if self.facts.routed_layers:
            request["return_routed_experts"] = True
        if self._model:
            request["model"] = self._model
        path = "/v1/completions"
        if pictures and not self.facts.renders_pictures:
            path, request = GENERATE, generate_request(request)
        headers: dict[str, str] = {}
        replica = min(range(self.facts.replicas), key=lambda each: self._in_flight[each])
        if sampling.n > 1 and self.facts.replicas > 1:
            # Else vLLM deals the samples out, and each replica computes their prompt.
            headers = {"X-data-parallel-rank": str(replica)}
        self._in_flight[replica] += sampling.n
        try:
            answer = await self._post(path, request, headers)
        finally:
            self._in_flight[replica] -= sampling.n
        try:
            choices = answer["choices"] if path != GENERATE else generated_choices(answer)
            choices = sorted(choices, key=lambda choice: choice["index"])
            completions = [
                completion_of(choice, sampling, special_tokens, pictures, self.facts.routed_layers)
                for choice in choices
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(
                f"{self._base_url}{path} answered without what is needed ({error!r}): "
                f"{json.dumps(answer)[:EXCERPT]}; it must support return_token_ids and logprobs"
            ) from error
        if len(completions) != sampling.n:
            raise EngineError(
                f"{self._base_url} returned {len(completions)} completions, asked for {sampling.n}"
            )
        return completions

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Natural logprobs, at temperature 1, of `token_ids[1:]`, each given all tokens before it. Raises
        RequestRefused, e.g. if they fill the context, or another EngineError.
        """
        answer = await self._post("/v1/completions", scoring_request(token_ids, self._model))
        try:
            logprobs = prompt_logprobs(answer, token_ids)
            if not all(map(math.isfinite, logprobs)):
                raise ValueError("one is not a finite number")
            return logprobs
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise RequestRefused(
                f"{self._base_url}/v1/completions answered without the logprobs of {len(token_ids)} tokens "
                f"({error!r}): {json.dumps(answer)[:EXCERPT]}"
            ) from error

    def _part(self, digest: str) -> dict[str, Any]:
        """Return a picture for a request. Raises RequestRefused if its file is missing or has changed."""
        if self.images is None:
            raise RequestRefused(f"picture {digest}: this client knows no directory of pictures")
        path = self.images / digest
        try:
            data = files.read(path)
        except FileNotFoundError:
            raise RequestRefused(f"{path}: this picture is missing") from None
        if digest_of(data) != digest:
            raise RequestRefused(f"{path}: this picture has changed; remove it, and start the run again")
        return image_url(data)

    async def expanded(
        self, token_ids: list[int], pictures: Sequence[str]
    ) -> tuple[list[int], list[Picture]]:
        """See LocalTokenizer: an engine expands the prompts that it goes on from itself."""
        raise EngineError("an environment that demonstrates has no engine")

    async def tokenize(self, text: str | Sequence[dict[str, Any]], **template: Any) -> list[int]:
        """Token ids of chat messages (through the chat template, with the generation prompt), or of a text
        that continues another one: they spell it exactly, also where the tokenizer puts a space in front of
        a text. `template`: what else the chat template gets, `tools` and `chat_template_kwargs`.
        """
        if isinstance(text, str):
            return await appended_text.token_ids(text, self._plain, self.detokenize, self._tokenizer_facts)
        return await self._tokenize({"messages": list(text), "add_generation_prompt": True, **template})

    async def tokenize_whole(self, text: str | Sequence[dict[str, Any]], **template: Any) -> list[int]:
        """Token ids of a whole sequence: chat messages without the generation prompt, or a text with special
        tokens, as `generate` reads it. `template`: as in `tokenize`.
        """
        if isinstance(text, str):
            return await self._tokenize({"prompt": text, "add_special_tokens": True})
        return await self._tokenize({"messages": list(text), "add_generation_prompt": False, **template})

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, with special tokens."""
        answer = await self._post("/detokenize", {"tokens": list(token_ids)})
        if not isinstance(answer.get("prompt"), str):
            raise EngineError(f"{self._base_url}/detokenize returned no text: {str(answer)[:EXCERPT]}")
        return answer["prompt"]

    async def _plain(self, text: str) -> list[int]:
        """Return the token ids of a text without special tokens, as the tokenizer begins a text."""
        return await self._tokenize({"prompt": text, "add_special_tokens": False})

    async def _tokenize(self, body: dict[str, Any]) -> list[int]:
        if self._renderer is not None and pictures_in(body.get("messages")):
            return await self._renderer._tokenize(body)
        answer = await self._post("/tokenize", body)
        if "tokens" not in answer:
            raise EngineError(f"{self._base_url}/tokenize returned no tokens: {str(answer)[:EXCERPT]}")
        return answer["tokens"]
