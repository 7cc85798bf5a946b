"""The model, as environments use it: single generations, and conversations that grow token by token."""

import asyncio
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any

from rollout.counter_rng import later
from rollout.engines.answers import ContextFull, ExpansionChanged, RequestRefused
from rollout.engines.client import EngineClient
from rollout.engines.completion import Completion, asked_ids
from rollout.environments.chat import ChatTemplate
from rollout.environments.tool_calls import Tool
from rollout.environments.turns import Messages, Prompt, is_chat, sample_of, turns_of
from rollout.origin import Sampling
from rollout.pictures import pictures_in
from rollout.tally import warn_once
from rollout.tasks.messages import checked_tools, has_unnamed, with_digests
from rollout.tasks.pictures import publish_picture
from rollout.tasks.task_set import Task, TaskError
from rollout.trajectory import Picture, Sample


class Policy:
    """The model, bound to one group. Each call draws with another seed.

    The first call uses the group's seed itself, so completion j of it has seed + j. Later calls hash the seed
    with their number. An environment that makes its samples at the same time uses `episode(j)` or
    `for_sample(j)` for each, so that the seeds do not depend on their speed.
    """

    def __init__(
        self, client: EngineClient, sampling: Sampling, seed: int, *, template: ChatTemplate | None = None
    ) -> None:
        self.sampling = sampling
        self._client = client
        self._seed = seed
        self._calls = 0
        self._template = template or ChatTemplate(
            client, variables=sampling.chat_template, parser=sampling.tool_parser
        )

    def for_sample(self, j: int) -> "Policy":
        """Return a policy for sample j alone. Its first call with n=1 draws the same as completion j of one
        call for all samples.
        """
        return Policy(self._client, self.sampling, self._seed + j, template=self._template)

    def resumed(self, j: int, drawn: int) -> "Policy":
        """Return a policy for sample j, of which `drawn` tokens are there: its first call, with n=1 and the
        tokens so far as the prompt, draws as if the sample had not been interrupted.
        """
        seed = later(self._seed + j, drawn)
        return Policy(self._client, self.sampling, seed, template=self._template)

    def derived(self, name: str) -> "Policy":
        """Return a policy whose seed depends only on this one's seed and on `name`, not on earlier calls."""
        seed = _hashed_seed(f"{name}/{self._seed}")
        return Policy(self._client, self.sampling, seed, template=self._template)

    def with_tools(self, tools: Sequence[Tool]) -> "Policy":
        """Return a policy that has these tools in its conversations: functions as in the OpenAI API,
        {"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}. The chat
        template shows them to the model, and `calls` of a turn are the tools that it calls.
        """
        return Policy(self._client, self.sampling, self._seed, template=self._template.with_tools(tools))

    def for_task(self, task: Task) -> "Policy":
        """Return a policy that has the tools of a task, if it has some. Raises TaskError for a `prompt`, in
        which no chat template can show them.
        """
        if not (tools := task.get("tools")):
            return self
        try:
            tools = checked_tools(tools)
        except ValueError as error:
            raise TaskError(f"task {task['id']!r}: `tools` {error}") from None
        if "messages" not in task:
            raise TaskError(
                f"task {task['id']!r}: a `prompt` goes to the model as it is, without the task's `tools`; "
                "give `messages`, or leave `tools` out"
            )
        return self.with_tools(tools)

    def episode(self, j: int = 0) -> "Episode":
        """Return an empty conversation, which becomes sample j. Use each j once: equal j draw the same
        tokens.
        """
        return Episode(self.for_sample(j))

    async def generate(
        self,
        prompt: Prompt,
        *,
        n: int = 1,
        max_tokens: int | None = None,
        stop: Iterable[str] = (),
        more: Mapping[str, Any] | None = None,
        pictures: Sequence[str] = (),
    ) -> list[Completion]:
        """`n` completions of a text, of token ids, or of chat messages. `max_tokens` can only lower the
        setting; `stop` adds to the setting's strings; `more` is that of Sampling. `pictures`: the digests of
        those that token ids have a placeholder for. Raises RequestRefused (e.g. if the prompt is too long, or
        if the model's chat template knows no tools) or another EngineError.
        """
        if "response_format" in (more or {}) and (setting := self._client.facts.why_no_form):
            raise RequestRefused(
                "response_format: the loss of this run takes tokens that a form forces for the policy's own "
                f"({setting}); use truncated, or ask for the form in the messages"
            )
        limit = self.sampling.max_tokens
        sampling = replace(
            self.sampling,
            n=n,
            seed=self._next_seed(),
            max_tokens=limit if max_tokens is None else min(max_tokens, limit),
            stop=tuple(dict.fromkeys([*self.sampling.stop, *stop])),
            more=more or {},
        )
        if is_chat(prompt):
            prompt = await self.with_pictures(prompt)
        tokens_or_text = await self._template.prompt(prompt) if is_chat(prompt) else prompt
        turns = turns_of(prompt)  # now: an environment may go on with the same list
        shown = pictures_in(prompt) if is_chat(prompt) else pictures
        pictured: dict[str, Any] = {"pictures": shown} if shown else {}
        completions = await self._client.generate(tokens_or_text, sampling, **pictured)
        return [
            await self._template.read(replace(completion, turns_before=turns)) for completion in completions
        ]

    async def with_pictures(self, messages: Messages) -> Messages:
        """Return messages whose pictures are files of the run, named by their digests. A part of a content is
        {"type": "image", "image": ...}, with bytes, a path, a data URI, a picture of PIL or an array (height,
        width, 3) of uint8, or an `image_url` of the OpenAI API. Raises RequestRefused.
        """
        if not any(map(has_unnamed, messages)):
            return messages
        if self._client.images is None:
            raise RequestRefused("content: a picture, and this client knows no directory of pictures")
        take = partial(publish_picture, directory=self._client.images)
        try:
            return await asyncio.to_thread(with_digests, messages, take)
        except ValueError as error:
            raise RequestRefused(str(error)) from error

    async def tokenize(self, text: str | Messages) -> list[int]:
        """Token ids of a text that continues another one (without special tokens), or of messages that begin
        a conversation.
        """
        if is_chat(text):
            return await self._template.prompt(text, answers=False)
        return await self._client.tokenize(text)

    async def tokenize_whole(self, text: str | Messages) -> list[int]:
        """Token ids of a text with its special tokens, or of messages without a generation prompt."""
        if is_chat(text):
            return await self._template.tokenize_whole(text)
        return await self._client.tokenize_whole(text)

    async def expanded(
        self, token_ids: list[int], pictures: Sequence[str]
    ) -> tuple[list[int], list[Picture]]:
        """Return the tokens of a prompt with its placeholders as what these pictures become, where nothing is
        generated, and where they are.
        """
        return await self._client.expanded(token_ids, pictures) if pictures else (token_ids, [])

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, with special tokens."""
        return await self._client.detokenize(token_ids)

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Natural logprobs, at temperature 1, of `token_ids[1:]`, each given all tokens before it."""
        return await self._client.prompt_logprobs(token_ids)

    async def rewrites(self, messages: Messages, token_ids: Sequence[int]) -> bool:
        """Return whether the messages, which continue these tokens (Episode.asked_ids), have to be rendered
        anew by the chat template: it gives them another beginning, and `sampling.history` is `template`.
        """
        if self.sampling.history != "template":
            return False
        return (await self._template.prompt(messages))[: len(token_ids)] != list(token_ids)

    @property
    def placeholder(self) -> int:
        """The token that stands for a picture; -1: the model is shown none."""
        return self._client.facts.placeholder

    async def continuation(self, new: Prompt, after: Completion) -> list[int]:
        """Token ids to append after a completion; see Episode.generate."""
        if is_chat(new):
            return await self._template.continuation(new, after)
        return await self._client.tokenize(new) if isinstance(new, str) else list(new)

    def _next_seed(self) -> int:
        call, self._calls = self._calls, self._calls + 1
        return self._seed if call == 0 else _hashed_seed(f"call/{self._seed}/{call}")


REPEATS = (
    "episode.generate was given the model's own last turn as a new message, so it is in the conversation "
    "twice: pass the new messages alone, not the whole conversation"
)


MOST_EMPTY_TURNS = 100
"""A conversation has so many at its end: a loop of so many steps may go on, an endless one not."""


class Episode:
    """One conversation, which only grows; it becomes one Sample.

    All its turns together may generate `sampling.max_tokens` (the setting rollout.max_tokens).
    """

    def __init__(self, policy: Policy, turns: Sequence[Completion] = ()) -> None:
        self._policy = policy
        self.turns = list(turns)
        """The turns generated so far; the prompt_ids of a turn hold all tokens before it."""

    @property
    def token_ids(self) -> list[int]:
        """All tokens so far: prompt, what was generated, observations."""
        return self.turns[-1].prompt_ids + self.turns[-1].token_ids if self.turns else []

    @property
    def asked_ids(self) -> list[int]:
        """All tokens so far as the engine is asked for the next ones: a placeholder for each picture."""
        pictures = self.turns[-1].pictures if self.turns else ()
        return asked_ids(self.token_ids, pictures, self._policy.placeholder)

    @property
    def _empty_turns(self) -> int:
        """How many turns at the end are empty, as there was no room for them."""
        turns = reversed(self.turns)
        return sum(
            1 for _ in takewhile(lambda turn: not turn.token_ids and turn.finish_reason == "length", turns)
        )

    @property
    def tokens_left(self) -> int:
        """How many tokens may still be generated."""
        return self._policy.sampling.max_tokens - sum(len(turn.token_ids) for turn in self.turns)

    async def generate(
        self,
        new: Prompt,
        *,
        max_tokens: int | None = None,
        stop: Iterable[str] = (),
        more: Mapping[str, Any] | None = None,
    ) -> Completion:
        """Generate the model's next turn, after `new`. At first `new` is the prompt, later only what to
        append: messages (the chat template closes the assistant's turn and opens the next), or a text or
        token ids (appended as they are). Generated tokens are never tokenised again.

        The turn ends (`length`) where the budget or the engine's context does. If there is no room at all, it
        is empty and nothing is appended. So a conversation only has to stop at `length`. The same holds after
        a turn that has the token for a picture: behind it nobody could tell where the pictures are.
        Raises RequestRefused if the engine refuses the prompt or the chat template refuses the messages,
        another EngineError if the engine fails, and RuntimeError after MOST_EMPTY_TURNS empty turns.
        """
        if empty := self._empty_turns:
            await asyncio.sleep(0)  # a loop that does not look lets others go on
        if empty >= MOST_EMPTY_TURNS:
            raise RuntimeError(
                f"the last {empty} turns are empty, as no tokens are left: stop when turn.finish_reason is "
                "'length'"
            )
        if not self.turns:
            (turn,) = await self._policy.generate(new, max_tokens=max_tokens, stop=stop, more=more)
        elif (tokens_left := self.tokens_left) <= 0 or any(
            self._policy.placeholder in turn.token_ids for turn in self.turns
        ):
            turn = self._out_of_room()
        else:
            last = self.turns[-1]
            pictures = [picture.digest for picture in last.pictures]
            if is_chat(new):
                if {"role": "assistant", "content": last.text} in new:
                    warn_once("repeats", REPEATS)
                new = await self._policy.with_pictures(new)
                pictures += pictures_in(new)
            limit, turns = tokens_left if max_tokens is None else min(max_tokens, tokens_left), turns_of(new)
            token_ids = self.asked_ids + await self._policy.continuation(new, after=last)
            try:
                (turn,) = await self._policy.generate(
                    token_ids, max_tokens=limit, stop=stop, more=more, pictures=pictures
                )
                turn = replace(turn, turns_before=turns)
            except RequestRefused as error:
                if more and not isinstance(error, ContextFull):  # it may be for what else is asked
                    raise
                warn_once("refused", f"a conversation ends after {len(self.turns)} turns: {error}")
                turn = self._out_of_room()
            is_same = [*turn.pictures[: len(last.pictures)]] == [*last.pictures]
            if pictures and not (is_same and turn.prompt_ids[: len(self.token_ids)] == self.token_ids):
                raise ExpansionChanged(
                    f"turn {len(self.turns)}: the engine makes other tokens of the {len(last.pictures)} "
                    "pictures before it than it did; its processor must be the same all the time"
                )
        self.turns.append(turn)
        return turn

    def sample(self, reward: float | None = None, metrics: dict[str, float] | None = None) -> Sample:
        """Return the conversation as a sample. Generated tokens are trained; the text is the last turn's. If
        a reward is given, the reward function is not called. Raises ValueError before the first turn.
        """
        if not self.turns:
            raise ValueError("an episode without a turn has no sample: await episode.generate(prompt) first")
        sample = sample_of(*self.turns)
        sample.reward = reward
        sample.metrics |= metrics or {}
        return sample

    def _out_of_room(self) -> Completion:
        return Completion(self.token_ids, [], [], "", "length", pictures=self.turns[-1].pictures)


def _hashed_seed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 2
