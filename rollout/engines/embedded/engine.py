"""The embedded engine: one thread owns a model and decodes all requests together.

Rows join and leave the running batch at every step (continuous batching). The same thread does all other work
with the model (pausing, new weights), between two steps.
"""

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from rollout.engines.content import Proof, WrongContent, module_sums, saved_sums
from rollout.engines.embedded.adapter import MergedAdapter
from rollout.engines.embedded.batch import Generation, SampleInProgress
from rollout.engines.embedded.batch_choice import batch_maker, why_no_pictures
from rollout.engines.embedded.endings import Endings
from rollout.engines.embedded.padded import PaddedBatch
from rollout.engines.embedded.picture_input import ShownPicture
from rollout.engines.embedded.weights import ModelWeights
from rollout.engines.model_dir import PathLike, WeightsError
from rollout.engines.model_facts import most_tokens, steady_tokens
from rollout.storage.retry import library_errors

log = logging.getLogger(__name__)
T = TypeVar("T")

QUIET_S, GATHER_S = 0.004, 0.1
"""Decoding begins when no request has come for QUIET_S, or after GATHER_S."""


class EngineStopped(RuntimeError):
    """The engine's thread has ended; the message says why."""


class EngineBusy(RuntimeError):
    """Requests are running: pause first."""


class EmbeddedEngine(threading.Thread):
    """Call `start()` first. Any thread may call the methods, which return futures."""

    def __init__(self, model_dir: PathLike, *, dtype: torch.dtype, max_batch: int) -> None:
        super().__init__(name="engine", daemon=True)
        self._dtype = dtype
        self.max_batch = max_batch
        self.model_dir = model_dir
        """Where the weights come from."""
        self._weights = ModelWeights(model_dir, dtype)
        self._proof = Proof()
        model = self._weights.model
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        positions = most_tokens(Path(model_dir)) or 2**31 - 1
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", positions)
        self.max_model_len = int(steady_tokens(Path(model_dir)) or positions)
        self._endings = Endings(model_dir)
        self._batch_maker = batch_maker(model)
        self._batch = self._batch_maker(model)
        self._adapter = MergedAdapter(model)
        self._takes_no_pictures: str | None = None
        """Why, once it has been tried."""
        self._waiting: deque[SampleInProgress] = deque()
        self._paused = False
        self._drained: list[Future[None]] = []
        self._inbox: queue.SimpleQueue[tuple[Callable[[], None], Future[Any]]] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self.tokens = self.completions = 0
        """How many were generated and finished since the engine was started."""

    @property
    def healthy(self) -> bool:
        return self._failure is None and self.is_alive()

    def submit(self, generation: Generation) -> "Future[list[SampleInProgress]]":
        """Queue a request, first come first served. Its future may fail with EngineStopped."""
        self._post(lambda: self._waiting.extend(generation.rows), generation.future)
        return generation.future

    def pause(self, mode: Literal["abort", "wait"]) -> "Future[None]":
        """Start no further request. The future is done when the started requests are finished. `abort` ends
        them at once, and the waiting ones too.
        """
        drained: Future[None] = Future()

        def pause() -> None:
            self._paused = True
            if mode == "abort":
                self._abort()
            self._drained.append(drained)

        self._post(pause, drained)
        return drained

    def resume(self) -> "Future[None]":
        """Start requests again. A pause that is not done fails with EngineBusy."""

        def resume() -> None:
            self._paused = False
            for drained in self._drained:
                _fail(drained, EngineBusy("resumed before the running requests were finished"))
            self._drained.clear()

        return self._call(resume)

    def prompt_logprobs(self, token_ids: list[int]) -> "Future[list[float]]":
        """Logprobs, at temperature 1, of `token_ids[1:]`."""
        return self._call(lambda: self._batch.prompt_logprobs(token_ids))

    def why_no_pictures(self, example: ShownPicture) -> "Future[str]":
        """Why the model cannot be shown pictures, found out by this one; empty if it can."""
        return self._call(lambda: self._why_no_pictures(example))

    def reload(self, model_dir: PathLike) -> "Future[None]":
        """Replace the weights. The new ones are read beside the old ones, which they replace only when they
        are whole. WeightsError, or EngineBusy if requests run, changes nothing.
        """
        return self._call(lambda: self._reload(model_dir))

    def load_adapter(self, adapter_dir: PathLike) -> "Future[None]":
        """Merge an adapter into the model's own weights, in place of the earlier one. Errors change nothing,
        as in `reload`.
        """

        def load() -> None:
            self._check_drained()
            self._adapter.load(adapter_dir)

        return self._call(load)

    def prove(self, model_dir: PathLike | None, adapter_dir: PathLike | None) -> "Future[list[str]]":
        """Compare the weights to those of a directory, as WorkerExtension.prove_content does for vLLM."""
        return self._call(lambda: self._prove(model_dir, adapter_dir))

    def run(self) -> None:
        try:
            with torch.inference_mode():
                while True:
                    self._work_off_inbox()
                    if not self._batch.rows and self._is_worth_waiting():
                        self._let_them_come()
                    self._admit()
                    if self._batch.rows:
                        self._take(0, *self._batch.step())
                    self._tell_drained()
        except Exception as error:  # the thread ends: every waiting request must fail
            log.critical("the engine stopped", exc_info=True)
            self._stop(error)

    def _is_worth_waiting(self) -> bool:
        """Return whether a waiting request would share steps with later ones; scoring takes one step only."""
        return self._may_start_next() and any(row.generation.max_tokens > 1 for row in self._waiting)

    def _let_them_come(self) -> None:
        """Take requests that arrive just now before decoding: rows that join one by one cost a step each."""
        give_up_at = time.monotonic() + GATHER_S
        with contextlib.suppress(queue.Empty):
            while time.monotonic() < give_up_at:
                _do(*self._inbox.get(timeout=QUIET_S))

    def _work_off_inbox(self) -> None:
        """Do what was asked for. If there is nothing to decode, wait for a request."""
        idle = not self._batch.rows and not self._may_start_next()
        try:
            _do(*self._inbox.get(block=idle))
            while True:
                _do(*self._inbox.get_nowait())
        except queue.Empty:
            pass

    def _admit(self) -> None:
        free = self.max_batch - len(self._batch.rows)
        # A prefill costs as much as a step: if more rows wait than fit, wait until several places are free.
        if len(self._waiting) > free and free < self.max_batch // 8:
            return
        rows: list[SampleInProgress] = []
        while len(rows) < free and self._may_start_next():
            row = self._waiting.popleft()
            if not row.generation.future.cancelled():
                row.generation.started = True
                rows.append(row)
        if rows:
            self._take(len(self._batch.rows), *self._batch.join(rows))

    def _may_start_next(self) -> bool:
        """Return whether the first waiting row may start. While paused, only a row of a started
        request may.
        """
        return bool(self._waiting) and (not self._paused or self._waiting[0].generation.started)

    def _take(self, begin: int, tokens: list[int], logprobs: list[float]) -> None:
        """Append the drawn tokens to the rows from `begin` on. Finished rows leave the batch."""
        rows = self._batch.rows
        going_on = list(range(begin))
        self.tokens += len(tokens)
        for i, (row, token, logprob) in enumerate(zip(rows[begin:], tokens, logprobs, strict=True), begin):
            row.token_ids.append(token)
            row.logprobs.append(logprob)
            row.finish_reason = self._endings.finish_reason(row)
            if row.finish_reason is not None:
                self.completions += 1
                _deliver(row.generation)
            elif not row.generation.future.cancelled():
                going_on.append(i)
        if len(going_on) < len(rows):
            self._batch.keep(going_on)

    def _abort(self) -> None:
        for row in [*self._batch.rows, *self._waiting]:
            row.finish_reason = "abort"
            _deliver(row.generation)
        self._waiting.clear()
        self._batch.keep([])

    def _tell_drained(self) -> None:
        if self._paused and not self._batch.rows and not self._may_start_next():
            for drained in self._drained:
                _settle(drained, None)
            self._drained.clear()

    def _check_drained(self) -> None:
        if self._batch.rows or any(row.generation.started for row in self._waiting):
            raise EngineBusy("requests are running: POST /pause?mode=wait first")

    def _reload(self, model_dir: PathLike) -> None:
        self._check_drained()
        if self._adapter.is_there or not self._weights.take(model_dir):
            self._weights = ModelWeights(model_dir, self._dtype, like=self._batch.model)
            self._batch_maker = batch_maker(self._weights.model)  # its configuration may be another
            self._takes_no_pictures = None
        model = self._weights.model
        self.model_dir = model_dir
        self._batch, self._adapter = self._batch_maker(model), MergedAdapter(model)

    def _why_no_pictures(self, example: ShownPicture) -> str:
        if self._takes_no_pictures is None:
            padding = "" if self._batch_maker is PaddedBatch else "padding changes the logits of its words"
            self._takes_no_pictures = padding or why_no_pictures(self._batch.model, example)
        return self._takes_no_pictures

    def _prove(self, model_dir: PathLike | None, adapter_dir: PathLike | None) -> list[str]:
        if model_dir is None and self._proof.has_begun:
            return self._proof.unproved
        expected = saved_sums(model_dir or self.model_dir, self._dtype)
        parameters, buffers = module_sums(self._batch.model)
        served = parameters | self._adapter.own_sums()
        served |= {name: sums for name, sums in buffers.items() if name in expected}
        if model_dir is None:
            self._proof.begin(expected, served)
            return self._proof.unproved
        self._proof.check(expected, served)
        if adapter_dir is not None:
            self._adapter.check(adapter_dir)
        return self._proof.unproved

    def _call(self, function: Callable[[], T]) -> "Future[T]":
        future: Future[T] = Future()

        def call() -> None:
            try:
                with library_errors():
                    result = function()
                _settle(future, result)
            except (WeightsError, WrongContent, EngineBusy) as error:
                _fail(future, error)
            except OSError as error:  # of a mount that fails now and then; the model is as it was
                _fail(future, WeightsError(f"the files cannot be read: {error}"))

        self._post(call, future)
        return future

    def _post(self, message: Callable[[], None], future: "Future[Any]") -> None:
        self._inbox.put((message, future))
        if self._failure is not None:  # after the put, because _stop sets it and then empties the inbox
            _fail(future, _stopped(self._failure))

    def _stop(self, failure: Exception) -> None:
        self._failure = failure
        futures: list[Future[Any]] = [row.generation.future for row in [*self._batch.rows, *self._waiting]]
        futures += self._drained
        while not self._inbox.empty():
            futures.append(self._inbox.get_nowait()[1])
        for future in futures:
            _fail(future, _stopped(failure))


def _do(message: Callable[[], None], future: "Future[Any]") -> None:
    """Do what was asked for. If it fails, the engine stops, and whoever asked is told."""
    try:
        message()
    except Exception as error:
        _fail(future, _stopped(error))
        raise


def _stopped(failure: Exception) -> EngineStopped:
    return EngineStopped(f"the engine stopped: {type(failure).__name__}: {failure}")


def _deliver(generation: Generation) -> None:
    if all(row.finish_reason is not None for row in generation.rows):
        _settle(generation.future, generation.rows)


def _settle(future: "Future[Any]", result: Any) -> None:
    with contextlib.suppress(InvalidStateError):  # the future was cancelled or has failed
        future.set_result(result)


def _fail(future: "Future[Any]", error: Exception) -> None:
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)
