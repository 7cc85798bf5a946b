"""The embedded engine as a node's: what it cannot serve, and its command line."""

import os
import re
import sys
from pathlib import Path

from rollout.engines.kinds.kind import EngineKind, ServerCommand, ServerSettingError
from rollout.engines.model_dir import PathLike, is_adapter, read_json, tensor_names
from rollout.engines.model_facts import context_tokens
from rollout.environment_variables import cores, omp_threads
from rollout.settings import EngineSettings

VARIABLES = frozenset(("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS"))
"""Environment variables that `command` sets, whatever the user sets."""
SLOW_PARAMETERS = 1e8
"""Above this it is no choice that anyone would have made where there are GPUs."""
EMBEDDINGS = re.compile(r"(^|\.)(wte|wpe|shared|\w*embed_(tokens|positions|in)|\w*embeddings?)$")
"""How modules are named that look tokens or positions up."""
CONV1D = {"gpt2", "openai-gpt"}
"""Families whose layers are Conv1D of transformers, which are linear but hold the weight transposed."""


class Embedded(EngineKind):
    """A server on PyTorch, on the CPU (rollout.engines.embedded)."""

    proves = True
    uses_transformers = True
    repeats_samples = True
    why_no_routes = ""

    def __init__(self, settings: EngineSettings, gpus: int, python: str = sys.executable) -> None:
        super().__init__(settings, gpus, python)
        reason = "vLLM is not installed: pip install -e '.[vllm]'" if gpus else "no GPU on this machine"
        of_vllm = {"args": settings.args, "tensor_parallel_size": (settings.tensor_parallel_size or 1) > 1}
        if unread := [f"engine.{name}" for name, is_given in of_vllm.items() if is_given]:
            reason += f", so {' and '.join(unread)} do nothing here"
        self.name = f"torch, the embedded engine ({reason if settings.kind == 'auto' else '--engine torch'})"
        self.dtype = "engine.dtype", settings.dtype

    def check(self) -> None:
        if self.settings.deterministic and self.settings.dtype != "float64":
            raise ServerSettingError(
                f"engine.deterministic=true with engine.dtype={self.settings.dtype}: the embedded engine "
                "does so in float64 alone; leave one of them out"
            )

    def check_model(self, name: str, model_dir: Path, parameters: int, lora_targets: str | None) -> None:
        if lora_targets is not None and not is_adapter(model_dir):
            self._check_adapters(name, model_dir, lora_targets)
        if self.settings.kind == "auto" and self.gpus and parameters > SLOW_PARAMETERS:
            raise ServerSettingError(
                f"this machine has {self.gpus} GPUs but no vLLM, and the embedded engine would generate "
                f"with {parameters / 1e9:.1f} B parameters on a CPU; pip install -e '.[vllm]', or give "
                "--engine torch"
            )

    def _check_adapters(self, name: str, model_dir: Path, lora_targets: str) -> None:
        """Raise ServerSettingError if adapters would sit on other modules than linear layers."""
        config = read_json(model_dir / "config.json")
        is_transposed = config.get("model_type") in CONV1D
        for target in (part.strip() for part in lora_targets.split(",")):
            modules = {
                name.removesuffix(".weight"): shape
                for name, (_, shape) in tensor_names(model_dir).items()
                if f".{name}".endswith(f".{target}.weight")
            }
            wrong = next((name for name, shape in modules.items() if len(shape) != 2), None)
            wrong = wrong or next((name for name in modules if EMBEDDINGS.search(name)), None)
            if is_transposed and target != "lm_head":
                wrong = wrong or next(iter(modules), "its Conv1D layers" if target == "all-linear" else None)
            if wrong is not None:
                raise ServerSettingError(
                    f"trainer.lora.targets={lora_targets}: {wrong} of {name} is not a linear layer, and the "
                    "embedded engine serves adapters of linear layers only; name others, or use vLLM"
                )

    def context(self, model_dir: Path) -> int | None:
        return context_tokens(model_dir)

    def command(
        self, model_dir: PathLike, socket: PathLike, lora_rank: int = 0, gpu_bytes: float | None = None
    ) -> ServerCommand:
        argv = [self.python, "-P", "-m", "rollout.engines.embedded.server", "--model", os.fspath(model_dir)]
        argv += ["--uds", os.fspath(socket)]
        argv += ["--dtype", self.settings.dtype, "--max-batch", str(self.settings.max_batch)]
        # Waiting threads sleep; spinning, they would take the cores from the processes that use the answers.
        threads = os.environ["OMP_NUM_THREADS"] if omp_threads(os.environ) else f"{cores()}"
        return ServerCommand(
            argv, {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000", "OMP_NUM_THREADS": threads}
        )
