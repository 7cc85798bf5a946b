"""Choose the server that generates, and build its command line and environment. Imports no server."""

import contextlib
import functools
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rollout.engines.model_dir import WeightsError
from rollout.engines.model_facts import attention_heads, count_parameters, steady_tokens
from rollout.environment_variables import cores, omp_threads
from rollout.plugins import is_installed
from rollout.settings import EngineSettings

ServerKind = Literal["vllm", "torch"]
EXTENSION = "rollout.engines.vllm_worker.WorkerExtension"
"""vLLM's --worker-extension-cls by which its workers prove their weights."""
LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo"
"""On Linux, where vLLM runs."""
SOCKET_BYTES = 100
"""Longest path of a Unix socket; systems take 104 to 108 bytes."""
ANSWER_S = 60.0
"""How long another Python may take to say what is installed for it: its files may be on a slow mount."""
RPC_BYTES = 37
"""What vLLM adds to the directory of the sockets between its processes."""

ON_CPU: dict[str, Any] = {
    "dtype": "float32",  # as training does; the checkpoint's own may be bfloat16
    "kv-cache-memory-bytes": 2 * 2**30,
    # With it 0.32 dies ("CPU Generator does not use offset") when it splits a prompt that has a seed.
    "enable-chunked-prefill": False,
}
"""Arguments that vLLM needs without a GPU. By default its cache of keys and values takes nine tenths of the
machine's memory, and leaves none to the trainer or a second node; VLLM_CPU_KVCACHE_SPACE overrides this."""
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


_WHOLE_UUID = re.compile("GPU-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
WEIGHTS_SHARE = 0.6
"""Of a GPU's memory: of the 0.85 that vLLM takes, a quarter is left to keys and values, and to computing."""


class ServerSettingError(ValueError):
    """No server can be started with these settings on this machine; one line says what to do."""


@dataclass(frozen=True)
class Server:
    """How a server is started, and its properties."""

    kind: ServerKind
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict[str, str])
    """Variables beside the environment that it inherits."""
    on_gpu: bool = False
    """Whether it holds GPU memory, which sleeping frees."""
    replicas: int = 1
    """How many copies of the model it holds, each with its own weights."""
    after_reload: tuple[str, ...] = ()
    """Methods of its workers to call after a reload of weights (rollout.engines.vllm_worker)."""
    proves: bool = True
    """Whether it can prove its weights (EngineAdmin.prove)."""
    dtype: str = ""
    """The number type that it computes in."""


def server_kind(settings: EngineSettings, gpus: int, python: str = sys.executable) -> ServerKind:
    """Return the kind of server that a node with this number of GPUs starts with this Python.

    `auto` takes the distribution `vllm` if there are GPUs. Another distribution of the module (`vllm-cpu`) is
    used only if the setting asks for vLLM.
    """
    if settings.kind != "auto":
        return settings.kind
    return "vllm" if gpus and _is_importable(python) and _is_distribution(python) else "torch"


def server_reason(settings: EngineSettings, gpus: int, python: str = sys.executable) -> str:
    """Say which server a node with this number of GPUs starts with this Python, and why."""
    kind = server_kind(settings, gpus, python)
    name = "vLLM" if kind == "vllm" else "torch, the embedded engine"
    if settings.kind != "auto":
        return f"{name} (--engine {kind})"
    if kind == "vllm":
        return f"{name} (there is a GPU)"
    why = "vLLM is not installed: pip install -e '.[vllm]'" if gpus else "no GPU on this machine"
    return f"{name} ({why})"


def engine_dtype(settings: EngineSettings, gpus: int, python: str = sys.executable) -> tuple[str, str]:
    """Return which setting chooses the number type of a node's engine, and that type."""
    if server_kind(settings, gpus, python) == "torch":
        return "engine.dtype", settings.dtype
    chosen = {_dashed(key): value for key, value in settings.args.items()}.get("dtype")
    return "engine.args.dtype", str(chosen or ("bfloat16" if gpus else "float32"))


def check_server(settings: EngineSettings, gpus: int, python: str = sys.executable) -> None:
    """Raise ServerSettingError unless a server can be started with these settings on this machine."""
    if server_kind(settings, gpus, python) != "vllm":
        return
    for key, value in settings.args.items():
        name = _dashed(key)
        if name in REFUSED:
            raise ServerSettingError(f"engine.args.{key}: {REFUSED[name]}")
        if name == "data-parallel-size" and not (isinstance(value, int) and value >= 1):
            raise ServerSettingError(f"engine.args.{key}={value}: must be a number, 1 or more")
    if not _is_importable(python):
        raise ServerSettingError(
            f"--engine vllm: vLLM is not installed for {python}; install the extra 'vllm' "
            "(pip install -e '.[vllm]'), or give --engine torch"
        )
    for item in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpus else ():
        if item.strip().startswith("GPU-") and not _WHOLE_UUID.fullmatch(item.strip()):
            raise ServerSettingError(
                f"CUDA_VISIBLE_DEVICES={item.strip()}: CUDA takes the beginning of a UUID, vLLM does not; "
                "give the whole one, which nvidia-smi -L lists, or the GPU's number"
            )
    if settings.tensor_parallel_size and gpus % settings.tensor_parallel_size:
        raise ServerSettingError(
            f"engine.tensor_parallel_size={settings.tensor_parallel_size} does not divide the {gpus} GPUs of "
            "this node; give a divisor, or choose GPUs with CUDA_VISIBLE_DEVICES"
        )


def replica_gpus(weights_bytes: float, heads: tuple[int, int], gpus: int, gpu_bytes: float) -> int:
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


def tensor_parallel_size(
    settings: EngineSettings, model_dir: Path, gpus: int, gpu_bytes: float | None
) -> int:
    """Return how many GPUs one replica takes: as it is set, or else by replica_gpus, and 1 where the memory
    or the size of the model is not known.
    """
    if settings.tensor_parallel_size or gpus < 2 or gpu_bytes is None:
        return settings.tensor_parallel_size or 1
    chosen = {_dashed(key): value for key, value in settings.args.items()}.get("dtype")
    try:
        weights_bytes = (4 if chosen in ("float32", "float") else 2) * count_parameters(model_dir)
    except WeightsError:  # which vLLM explains by itself
        return 1
    return replica_gpus(weights_bytes, attention_heads(model_dir), gpus, gpu_bytes)


def server_command(
    settings: EngineSettings,
    model_dir: str | os.PathLike[str],
    socket: str | os.PathLike[str],
    gpus: int,
    lora_rank: int = 0,
    python: str = sys.executable,
    gpu_bytes: float | None = None,
) -> Server:
    """Return a server of `model_dir` that listens on a Unix socket, on a node with this number of GPUs.

    `socket`: its path, in a directory that no other user can enter, because every client can load weights.
    It must not exist yet, and may have SOCKET_BYTES, its directory RPC_BYTES less. The base URL is "unix:",
    followed by the path.
    `lora_rank`: the largest rank of the adapters that it will load, 0 for no adapters. `python`: what runs
    it. `gpu_bytes`: the memory of the smallest GPU, if it is known.
    """
    if server_kind(settings, gpus, python) == "torch":
        argv = [python, "-P", "-m", "rollout.engines.embedded.server", "--model", os.fspath(model_dir)]
        argv += ["--uds", os.fspath(socket)]
        argv += ["--dtype", settings.dtype, "--max-batch", str(settings.max_batch)]
        # Waiting threads sleep; spinning, they would take the cores from the processes that use the answers.
        threads = os.environ["OMP_NUM_THREADS"] if omp_threads(os.environ) else f"{cores()}"
        variables = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000", "OMP_NUM_THREADS": threads}
        return Server("torch", argv, variables, dtype=settings.dtype)
    size = tensor_parallel_size(settings, Path(model_dir), gpus, gpu_bytes)
    args = {
        "uds": os.fspath(socket),
        # Raw logprobs are not from the distribution that was sampled from.
        "logprobs-mode": "processed_logprobs",
        # Else defaults for a request, such as penalties, come from the model's generation_config.json, and
        # the trainer does not know them. Its end-of-sequence ids hold in any case.
        "generation-config": "vllm",
        "disable-uvicorn-access-log": True,
        "worker-extension-cls": EXTENSION,
        "tensor-parallel-size": size,
        "data-parallel-size": max(1, gpus // size),
        **(_on_gpus(settings) if gpus else ON_CPU),
        **(_for_adapters(lora_rank) if lora_rank else {}),
        **_context(Path(model_dir)),
        **{_dashed(key): value for key, value in settings.args.items()},
    }
    one_process = {}
    if not gpus and args["data-parallel-size"] == size == 1:
        # Else the processes that schedule and compute each spin on a core, waiting for each other.
        args = {"distributed-executor-backend": "uni", **args}
        one_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return Server(
        "vllm",
        [python, "-P", "-m", *_program(os.fspath(model_dir), python), *_arguments(args)],
        # The first variable enables the calls that load weights, sleep and wake. An API key of the user's
        # environment would refuse our requests. On a CPU all servers would bind their threads to one core.
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
        },
        on_gpu=gpus > 0,
        replicas=args["data-parallel-size"],
        after_reload=() if gpus else ("repack_kept_weights",),
        proves=args["worker-extension-cls"] == EXTENSION,
        dtype=str(args["dtype"]),
    )


def _on_gpus(settings: EngineSettings) -> dict[str, Any]:
    # Training computes in bfloat16 too, whatever the checkpoint's own is.
    return {
        "dtype": "bfloat16",
        "gpu-memory-utilization": 0.85,
        "enable-sleep-mode": settings.sleep != "restart",
        "max-model-len": "auto",  # the model's own, or what fits the memory
    }


def _for_adapters(lora_rank: int) -> dict[str, Any]:
    fits = (rank for rank in LORA_RANKS if rank >= lora_rank)
    # vLLM starts a front end for each replica. Only one alone may load adapters, because it tells no other.
    return {"enable-lora": True, "max-lora-rank": next(fits, lora_rank), "api-server-count": 1}


def _context(model_dir: Path) -> dict[str, Any]:
    """Bound the context where vLLM would choose other frequencies for a longer one than the trainer has."""
    with contextlib.suppress(WeightsError):  # which vLLM explains by itself
        if steady := steady_tokens(model_dir):
            return {"max-model-len": steady}
    return {}


def _program(model_dir: str, python: str) -> list[str]:
    """`vllm serve`; another distribution cannot use it, because it asks for the version of `vllm`."""
    if _is_distribution(python):
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


def _is_importable(python: str) -> bool:
    if python != sys.executable:
        return _answers(python, "import importlib.util as u; assert u.find_spec('vllm')")
    return is_installed("vllm")


def _is_distribution(python: str) -> bool:
    if python != sys.executable:
        return _answers(python, "from importlib.metadata import version; version('vllm')")
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@functools.cache
def _answers(python: str, program: str) -> bool:
    """Return whether another Python runs a program without an error; asked once."""
    try:
        done = subprocess.run(
            [python, "-P", "-c", program], capture_output=True, timeout=ANSWER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
