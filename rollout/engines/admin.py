"""Administer a server that generates: its health, its weights, its memory.

It uses paths that vLLM has with VLLM_SERVER_DEV_MODE=1; the embedded server has them too.
"""

import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollout.engines.answers import (
    GENERATE,
    WRONG_WEIGHTS,
    EngineError,
    EngineFacts,
    prompt_logprobs,
    scoring_request,
)
from rollout.engines.calls import Calls, EngineDead
from rollout.engines.model_dir import PathLike, WeightsError, check_model_dir, is_adapter, tensor_names
from rollout.engines.token_counts import Generated

EXTENSION = "rollout.engines.vllm_worker.WorkerExtension"
"""vLLM's --worker-extension-cls by which its workers prove their weights."""
TO_PROVE = f"start vLLM with --worker-extension-cls {EXTENSION}"
"""What to do where a server cannot prove its weights."""
LOADING = "loading"
"""The weight version of an engine whose weights are being replaced. No policy has this digest."""
DROPPED = "dropped"
"""The weight version of an engine that sleeps without its weights."""
LOOK_S = 0.05
"""How often a server that starts is asked whether it answers."""

_ADAPTER = "policy-"


def adapter_name(digest: str) -> str:
    """Return the model name in a request that only the adapter of this policy answers."""
    return f"{_ADAPTER}{digest}"


class WrongWeights(EngineError):
    """A server computes with other weights than it should; the message names tensors and sums."""


class EngineAdmin:
    """Administers one engine by blocking calls, each with a timeout. Raises EngineError."""

    def __init__(
        self,
        base_url: str,
        *,
        after_reload: Sequence[str] = (),
        timeout_s: float = 30.0,
        drain_timeout_s: float = 1800.0,
    ) -> None:
        """`after_reload`: methods of its workers to call after a reload (rollout.engines.vllm_worker). The
        timeouts are those of Calls.
        """
        self._calls = Calls(base_url, timeout_s, drain_timeout_s)
        self._after_reload = after_reload

    def healthy(self, timeout_s: float = 5.0) -> bool:
        """Return whether the engine answers that it works."""
        return self.health(timeout_s) is True

    def health(self, timeout_s: float = 5.0) -> bool | None:
        """True: it works. False: it says that it is dead, and will not come back. None: it says neither."""
        try:
            self._calls.call("GET", "/health", timeout_s=timeout_s)
        except EngineDead:
            return False
        except EngineError:
            return None
        return True

    def generated(self) -> Generated:
        """Return how much the engine has generated since it was started."""
        return Generated.read(self._calls.text("/metrics"))

    def check(self) -> None:
        """Raise EngineError unless there is an engine that works, and that the calls here can administer."""
        self._calls.call("GET", "/health")
        self._version()

    def wait_healthy(self, timeout_s: float, alive: Callable[[], bool]) -> None:
        """Wait until the engine answers. Raises EngineError after `timeout_s`, or when `alive()` says that
        its process is gone.
        """
        give_up_at = time.monotonic() + timeout_s
        while not self.healthy():
            if not alive():
                raise EngineError(
                    f"the engine for {self._calls.base_url} exited before it answered; see its log"
                )
            if time.monotonic() + LOOK_S > give_up_at:
                raise EngineError(
                    f"{self._calls.base_url} did not become healthy within {timeout_s:g} s; see its log"
                )
            time.sleep(LOOK_S)

    def policy(self) -> str | None:
        """Return the digest given at the last reload. None while weights are being replaced, after that has
        failed, or when they were dropped.
        """
        version = self._version()
        return None if version in (LOADING, DROPPED) else version

    def name_policy(self, digest: str) -> None:
        """Set the digest of the weights that the engine was started with."""
        self._set_version(digest)

    def reload(self, path: PathLike, digest: str, *, like: PathLike | None = None) -> None:
        """Replace the weights by those of a model directory. From then on `policy()` is `digest`.

        The files are verified first. If `like` is given, and whole, they must have the tensors (names and
        shapes) of that model directory: vLLM accepts a directory that lacks tensors, and then generates
        garbage. After a WeightsError the engine serves as before. After an EngineError it may have half of
        the weights: it stays paused and has no policy, so that it cannot serve them. Then reload a good
        checkpoint, or restart it. A sleeping engine is woken.
        """
        if is_adapter(path):
            raise WeightsError(f"{os.fspath(path)}: is an adapter, not a whole model; load its model first")
        _check(path, like)
        asleep = self.is_sleeping()
        # For vLLM a paused engine sleeps too, and waking would resume it. So do not wake an engine that a
        # failed reload left paused with half of the weights.
        if asleep and self._version() != LOADING:
            self.wake("weights")
        self._calls.post("/pause?mode=wait")
        self._set_version(LOADING)
        reload_weights = {"method": "reload_weights", "kwargs": {"weights_path": os.fspath(path)}}
        try:
            self._calls.post("/collective_rpc", reload_weights)
            for method in self._after_reload:
                self._calls.post("/collective_rpc", {"method": method})
            # Else vLLM goes on with keys and values of the old weights: wrong outputs, without an error.
            self.reset_prefix_cache()
            if asleep:
                self.wake("kv_cache")  # last, because it resumes vLLM
        except EngineError as error:
            raise EngineError(
                f"loading {os.fspath(path)} into {self._calls.base_url} failed, it stays paused; "
                f"reload a good checkpoint or restart it: {error}"
            ) from error
        self._set_version(digest)
        self._calls.post("/resume")

    def load_adapter(self, path: PathLike, digest: str, *, like: PathLike | None = None) -> None:
        """Serve an adapter of the engine's model as `adapter_name(digest)`, in place of any earlier adapter.
        From then on `policy()` is `digest`. The files are verified first, as by `reload`.

        After a WeightsError, or an EngineError because the engine refuses the adapter, it serves as before. A
        sleeping engine is woken. An engine whose weights are not whole must `reload` its model first.
        """
        if not is_adapter(path):
            raise WeightsError(f"{os.fspath(path)}: is a whole model, not an adapter")
        _check(path, like)
        if self._version() in (LOADING, DROPPED):
            raise EngineError(
                f"{self._calls.base_url} has no weights to add an adapter to: reload its model first"
            )
        if self.is_sleeping():
            self.wake()
        name = adapter_name(digest)
        self._calls.post("/pause?mode=wait")
        try:
            body = {"lora_name": name, "lora_path": os.fspath(path), "load_inplace": True}
            self._calls.post_adapter("/v1/load_lora_adapter", body)
            # vLLM's prefix cache knows an adapter by name and path, also after it was loaded again.
            self.reset_prefix_cache()
            for model in self._calls.get("/v1/models", "data"):
                if model["id"].startswith(_ADAPTER) and model["id"] != name:
                    self._calls.post_adapter("/v1/unload_lora_adapter", {"lora_name": model["id"]})
            self._set_version(digest)
        finally:
            self._calls.post("/resume")

    def reset_prefix_cache(self) -> None:
        """Have the engine forget keys and values of earlier prompts; EngineError while requests run."""
        if not self._calls.post("/reset_prefix_cache").get("success", True):
            raise EngineError("the prefix cache was not reset: requests are still running")

    def can_prove(self) -> bool:
        """Return whether the server can prove its weights. For vLLM this takes seconds, when it is first
        asked.
        """
        answer = self._server_info()
        try:
            return answer["vllm_config"]["parallel_config"]["worker_extension_cls"] == EXTENSION
        except (KeyError, TypeError):
            return False

    def facts(self) -> EngineFacts:
        """Return the facts that the server says of itself, else the defaults. As slow as `can_prove`."""
        answer = self._server_info()
        facts = EngineFacts(
            is_seeded=answer.get("is_seeded") is True, renders_pictures=answer.get("renders_pictures") is True
        )
        try:
            config = answer["vllm_config"]
            samples = _most_samples(config["scheduler_config"])
            samples *= int(config["parallel_config"]["data_parallel_size"])
            return replace(facts, samples=samples)
        except (KeyError, TypeError, ValueError):
            return facts

    def try_generate(self) -> None:
        """Raise EngineError unless the server generates where vLLM takes pictures."""
        self._calls.post(GENERATE, {"token_ids": [0], "sampling_params": {"max_tokens": 1}})

    def most_samples(self) -> int:
        """Return how many samples a replica generates at the same time: of a vLLM that can prove its weights,
        which answers this at once.
        """
        answer = self._calls.post("/collective_rpc", {"method": "scheduler"})
        try:
            return _most_samples(answer["results"][0])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineError(
                f"POST {self._calls.base_url}/collective_rpc scheduler answered {answer}"
            ) from error

    def _server_info(self) -> dict[str, Any]:
        return self._calls.call(
            "GET", "/server_info?config_format=json", timeout_s=self._calls.drain_timeout_s
        )

    def prove(self, path: PathLike | None = None, adapter: PathLike | None = None) -> list[str]:
        """Have the server compare the weights that it computes with to the model directory `path`, and to the
        directory of an adapter. Returns the blocks of tensors that are not proved, because it changes them
        when it loads them. Raises WrongWeights if others differ.

        Without `path` it finds out which blocks it changes, from what it has loaded last. Ask this before its
        first reload. Do not ask a vLLM that cannot prove: one with several ranks would answer nothing right.
        """
        kwargs = {"path": path, "adapter": adapter}
        paths = {key: os.path.abspath(value) for key, value in kwargs.items() if value is not None}
        try:
            answer = self._calls.post("/collective_rpc", {"method": "prove_content", "kwargs": paths})
        except EngineError as error:
            _, beginning, difference = str(error).partition(WRONG_WEIGHTS)
            if not beginning:
                raise
            target = " and ".join(paths.values())
            # vLLM's answer goes on after the sentence.
            difference = re.split(r"""\.(?:['"]|$)""", difference)[0]
            raise WrongWeights(
                f"{self._calls.base_url} was to serve {target}; {beginning}{difference}"
            ) from error
        return list(answer["results"][0])

    def sleep(self, level: int) -> None:
        """Free the accelerator's memory. Level 1 keeps the weights in host memory, level 2 drops them.
        Running requests end first.
        """
        if level == 2:
            self._set_version(DROPPED)  # waking does not bring them back, and the engine does not say so
        self._calls.post(f"/sleep?level={level}&mode=wait")

    def wake(self, *tags: str) -> None:
        """Undo sleep; only for `weights` or `kv_cache` if named."""
        self._calls.post("/wake_up" + "".join(f"{'&' if n else '?'}tags={tag}" for n, tag in enumerate(tags)))

    def is_sleeping(self) -> bool:
        """Return whether it sleeps, in whole or in part. For vLLM a paused engine sleeps too."""
        return bool(self._calls.get("/is_sleeping", "is_sleeping"))

    def prompt_logprobs(
        self, token_ids: Sequence[int], replica: int = 0, *, model: str | None = None
    ) -> list[float]:
        """Natural logprobs, at temperature 1, of `token_ids[1:]`, each given all tokens before it.

        `replica`: which copy of the model in a data-parallel server to ask. `model`: the name of an adapter.
        """
        path, body = "/v1/completions", scoring_request(token_ids, model)
        answer = self._calls.post(path, body, headers={"X-data-parallel-rank": str(replica)})
        try:
            return prompt_logprobs(answer, token_ids)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineError(
                f"POST {self._calls.base_url}{path} answered without the prompt's logprobs ({error!r}): "
                f"{json.dumps(answer)[:500]}"
            ) from error

    def _version(self) -> str:
        return str(self._calls.get("/weight_info", "weight_version"))

    def _set_version(self, version: str) -> None:
        self._calls.post("/update_weight_version", {"new_version": version})


def _most_samples(scheduler: Mapping[str, Any]) -> int:
    """Return how many samples vLLM generates at the same time with these settings of its scheduler."""
    active = "max_num_active_seqs"  # not in older versions
    return int((active in scheduler and scheduler[active]) or scheduler["max_num_seqs"])


def _check(path: PathLike, like: PathLike | None) -> None:
    """Raise WeightsError unless the directory is whole and has the tensors of `like`."""
    check_model_dir(path)
    if like is None:
        return
    shapes = {name: shape for name, (_, shape) in tensor_names(path).items()}
    try:
        expected = {name: shape for name, (_, shape) in tensor_names(like).items()}
    except WeightsError:  # what the engine served before was damaged since: these files may be whole
        return
    for name in sorted(shapes.keys() | expected.keys()):
        if shapes.get(name) != expected.get(name):
            raise WeightsError(
                f"{os.fspath(path)}: tensor {name!r} has shape {shapes.get(name, 'none (it is missing)')}, "
                f"in {os.fspath(like)} it has {expected.get(name, 'none (it is missing)')}"
            )
