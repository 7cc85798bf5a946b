"""Trains on GPUs that are not there, and prints what it took: `rehearsal.py MODEL_DIR GPUS SETTINGS`.

The trainer's own code runs, but for reading files, trying kernels, and exchanging values. Without arguments
it reads them as lines of JSON, and trains for each in a fork, which saves importing torch.
"""

import json
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.dry.fake_gpus import BYTES, MODE, install  # before torch

import numpy as np  # isort: skip
import torch  # isort: skip
import torch.distributed as dist  # isort: skip
import peft  # noqa: F401 # isort: skip - each fork with adapters would import it
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily  # isort: skip
from torch.distributed.device_mesh import DeviceMesh  # isort: skip
from torch.distributed.tensor import DTensor  # isort: skip
from torch.testing._internal.distributed.fake_pg import FakeStore  # isort: skip

from trainer.checkpoint import hub_files  # isort: skip
from trainer.batch.batch import Batch, Counts  # isort: skip
from trainer.batch.packing import Packing  # isort: skip
from trainer.model import context, host_memory, loading, parallel, slices  # isort: skip
from trainer.model.arrangement import Arrangement  # isort: skip
from trainer.model.learner import Learner, build_learner  # isort: skip
from trainer.model.attention import Kernel  # isort: skip
from trainer.model.parallel import local_part  # isort: skip
from trainer.settings import TrainerSettings  # isort: skip
from trainer.update.step import train  # isort: skip

LENGTH, STEPS, MICROBATCHES = 1024, 2, 2
DEVICE = torch.device("cuda", 0)


def patch() -> None:
    """Read no values of files, and try no kernels."""
    patched: Any = loading
    blank_model, layout_of = slices.blank_model, parallel.Layout.choose
    with_adapters, hold_frozen = loading._with_blank_adapters, loading._hold_frozen

    def fill(whole: Any, held: Any, *_: Any, **__: Any) -> None:
        for module, name in held.values():
            buffer = module._buffers.get(name)
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=DEVICE)

    def apart(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            with unset_fake_temporarily():
                return function(*arguments)

        return call

    def load_model(directory: Path, dtype: torch.dtype) -> Any:
        blank = slices.blank_model(directory, dtype)[0].to_empty(device="cpu")
        blank.tie_weights()
        return blank

    def held(blank: Any, *given: Any) -> None:
        on_meta = any(p.is_meta and not isinstance(p, FakeTensor) for p in blank.parameters())
        (apart(hold_frozen) if on_meta else hold_frozen)(blank, *given)

    slices.fill, slices.blank_model = fill, apart(blank_model)
    slices.copy_part = lambda _tensor, _value: None
    patched.load_model, patched._hold_frozen = load_model, held
    patched._with_blank_adapters = apart(with_adapters)
    meshes: Any = DeviceMesh
    if hasattr(meshes, "_compute_coordinate_on_dim"):  # not in torch 2.11
        meshes._compute_coordinate_on_dim = apart(meshes._compute_coordinate_on_dim)
    parts: Any = DTensor
    parts.__create_chunk_list__ = apart(parts.__create_chunk_list__)
    host_memory.pin = lambda _held: None
    parallel.Layout.choose = staticmethod(apart(layout_of))
    found = Arrangement(packing=Packing(several=True), kernels={Kernel.VARLEN: ""})

    def arrange(self: Learner, share_prompts: bool) -> None:
        self.arrangement = found
        self._is_divided = self.layout.context_parallel > 1
        context.register(self.layout)

    Learner.arrange = arrange


def make_batch(sequences: int) -> Batch:
    """Sequences of LENGTH tokens, an eighth of them the prompt."""
    tokens, generator = sequences * LENGTH, np.random.default_rng(0)
    mask = np.tile(np.arange(LENGTH) >= LENGTH // 8, sequences)
    return Batch(
        token_ids=generator.integers(3, 1000, tokens).astype(np.int32),
        loss_mask=mask.astype(np.uint8),
        logprobs=np.where(mask, -1.0, 0).astype(np.float32),
        offsets=np.arange(0, tokens + 1, LENGTH),
        advantages=np.full(sequences, 0.5, np.float32),
        rewards=np.zeros(sequences, np.float32),
        slots=np.arange(sequences, dtype=np.int32),
        temperatures=np.ones(sequences, np.float32),
        ages=np.zeros(tokens, np.int32),
        counts=Counts(sequences, sequences, sequences, sequences, 0, 0.0, 0.0),
        manifest_sha256="",
        policy="",
        seed=0,
    )


def host_places(learner: Learner) -> list[int]:
    """Where weights and moments lie in host memory."""
    tensors = [*learner.parameters.values()]
    tensors += [value for state in learner.optimizer.state.values() for value in state.values()]
    return [local_part(tensor).untyped_storage()._cdata for tensor in tensors]


SUMMED_ON: set[str] = set()
"""Types of devices on which weights that are written were added up."""


def write(learner: Learner) -> None:
    """Write the weights to nowhere."""
    patched: Any = hub_files
    patched.content_sum = lambda value: SUMMED_ON.add(value.device.type) or 0
    patched.gather_json = lambda share, _doing: [share]
    outputs: Any = SimpleNamespace(keeps=lambda _owner: True, add=lambda *_: None)
    hub_files.write_weights(learner, outputs, torch.bfloat16, Path())


def main(model_dir: Path, gpus: int, settings: TrainerSettings) -> dict[str, Any]:
    """Train for STEPS steps of MICROBATCHES a rank, go to host memory and back, and train on one more."""
    install()
    dist.init_process_group("fake", rank=0, world_size=gpus, store=FakeStore())
    os.environ["LOCAL_WORLD_SIZE"] = str(min(8, gpus))
    patch()
    ranks = gpus // settings.tensor_parallel_size // settings.context_parallel
    count = settings.max_tokens_per_microbatch // LENGTH * ranks * MICROBATCHES
    settings = settings.model_copy(update={"global_batch_size": count})
    with MODE, BYTES:
        learner = build_learner(model_dir, DEVICE, settings)
        loading, loaded = BYTES.peak, BYTES.now
        if settings.needs_reference:
            learner.load_reference(model_dir, settings)

        def step(sequences: int) -> None:
            batch = make_batch(sequences)
            weights = [1.0] * gpus
            train(learner, batch, settings, max_tokens=4096, rank_weights=weights, report=lambda _: None)

        step(count * STEPS)
        peak, held, own = BYTES.peak, BYTES.now, dict(learner.model.named_parameters())
        learner.to_host()
        left = BYTES.now
        away = {local_part(value).device.type for value in learner.parameters.values()}
        places = host_places(learner)
        learner.to_device()
        back = BYTES.now
        step(count // MICROBATCHES)
        again = BYTES.peak
        if not settings.lora.rank:
            write(learner)
        written = BYTES.peak
        learner.to_host()
        return {
            "sharded": learner.layout.sharded,
            "loading": loading,
            "loaded": loaded,
            "peak": peak,
            "left": left,
            "held": held,
            "back": back,
            "away": sorted(away),
            "same": all(own[name] is value for name, value in learner.parameters.items()),
            "again": again,
            "written": written,
            "summed": sorted(SUMMED_ON),
            "reused": places == host_places(learner),
        }


def rehearse(model_dir: str, gpus: str, settings: str) -> None:
    """Print what a training took, and end this process."""
    print(json.dumps(main(Path(model_dir), int(gpus), TrainerSettings(**json.loads(settings)))))
    sys.stdout.flush()
    os._exit(0)  # fake tensors leave nothing to take apart


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    if len(sys.argv) > 1:
        rehearse(*sys.argv[1:])
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            rehearse(*json.loads(line))
        if os.waitpid(pid, 0)[1]:
            sys.exit(1)
