"""One rank of the training job: it serves the requests of its node's spool, in order, until it is killed."""

import hashlib
import logging
import os
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from rollout.storage import files, hashing
from rollout.storage.hashing import FileFacts
from rollout.storage.retry import waiting_for_space
from trainer.batch.batch import Batch, DamagedBatch
from trainer.checkpoint import checkpoint
from trainer.checkpoint.probe import probe_tokens
from trainer.checkpoint.state import StateSaver
from trainer.documents import TrainedBatch, TrainRequest
from trainer.job import launch, space_waits
from trainer.job.doorbell import Doorbell
from trainer.job.profile import StepProfiler
from trainer.model.learner import Learner, learning_rate
from trainer.model.lora import LoraError
from trainer.model.parallel import LayoutError
from trainer.model.pictures import RunPictures
from trainer.peers import waiting_for_peers
from trainer.progress import Progress
from trainer.update.step import train
from trainer.update.step_stats import StepStats, by_source, summary

OF_A_NODE = {
    *("batch_file", "base_dir", "model_dir", "model_name", "staging_dir", "state_dir", "resume"),
    *("profile", "copy_dir", "images_dir"),
}
"""Fields of a request that may differ between nodes, because they are paths."""

SAID_BYTES = 10**9
"""What it took to write a checkpoint above this is printed."""

COME_AGAIN = (LayoutError, LoraError, ImportError)
"""Errors of settings that do not fit the model, and of an installation: they come again."""

logger = logging.getLogger(__name__)


class TrainingRequestRefused(ValueError):
    """The request does not fit this job, or its ranks were asked for different things."""


def serve(spool: Path, collective_timeout_s: float) -> NoReturn:
    """Join the process group that torchrun describes in the environment, and serve until the node ends it.

    A failure is reported in the spool and ends the process with exit status 1.
    """
    disable_progress_bar()
    renew_threads()
    local_rank = int(os.environ["LOCAL_RANK"])
    number = 0
    try:
        on_gpu = check_gpus(os.environ.get(launch.GPUS)) > 0
        device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        with waiting_for_peers("meeting them"):
            dist.init_process_group(
                # Ranks exchange documents by gloo, which needs no GPU.
                "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
                timeout=timedelta(seconds=collective_timeout_s),
                device_id=device if on_gpu else None,
            )
        rank = TrainerRank(device, collective_timeout_s)
        bell = Doorbell(launch.bell(spool, local_rank))
        while True:
            number, data = launch.next_request(spool, number, bell.wait)
            say = partial(launch.report_progress, spool, number)
            progress = Progress(say) if local_rank == 0 else Progress()
            # Half of the time that its peers wait for it: then this rank says what was missing.
            space_s = collective_timeout_s / 2
            with waiting_for_space(space_s, partial(space_waits.report, spool, number, local_rank, space_s)):
                copied = partial(launch.report_copied, spool, number, local_rank)
                rank.run(TrainRequest.from_json(data), progress, copied, takes_profile=local_rank == 0)
            launch.report_done(spool, number, local_rank)
    except Exception as error:
        comes_again = isinstance(error, COME_AGAIN)
        launch.report_failure(spool, number, local_rank, traceback.format_exc(), comes_again)
        logger.exception("request %d failed", number)
        # An ordinary exit would run destructors, which may wait for peers that hang in a collective.
        os._exit(1)


def renew_threads() -> None:
    """Make torch's pool of threads, which a fork of the agent has lost.

    Else the threads that load a model do it at the same time, and in one of six forks one of them finds no
    pool ("Invalid thread pool!").
    """
    torch.set_num_threads(torch.get_num_threads())


def check_gpus(counted: str | None) -> int:
    """Return how many GPUs torch sees; raises LayoutError if the node has `counted` others."""
    gpus = torch.cuda.device_count()
    if counted is not None and int(counted) != gpus:
        raise LayoutError(
            f"this machine has {counted} GPUs by nvidia-smi and CUDA_VISIBLE_DEVICES, and torch "
            f"{torch.__version__} sees {gpus}: install a torch for the driver, or nvidia-smi, or start with "
            "CUDA_VISIBLE_DEVICES= to compute on the CPU (AMD's GPUs are not supported)"
        )
    return gpus


class TrainerRank:
    """A rank's model and optimizer, kept between requests."""

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        """Begin without a model; the process group exists. Saving a state in the background may take
        `timeout_s`.
        """
        self.device = device
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.saver = StateSaver(timeout_s)
        self.learner: Learner | None = None
        self.policy = ""
        """Digest of the checkpoint that `learner` was last loaded from or written to."""

    def run(
        self,
        request: TrainRequest,
        progress: Progress,
        copied: Callable[[Mapping[str, FileFacts] | None], None] = lambda _files: None,
        takes_profile: bool = True,
    ) -> None:
        """Do one training phase, from the batch file to a complete staging directory.

        With request.ahead `copied` is called once the new policy is on this node and its engine may have the
        GPU; see checkpoint.write. `takes_profile`: this rank is the one of its node that does, where a
        profile is asked for.
        """
        started = time.perf_counter()
        settings = request.settings
        progress.expect(2)  # the policy and the checkpoint
        if len(request.rank_weights) != self.world_size:
            raise TrainingRequestRefused(
                f"the request has {len(request.rank_weights)} rank weights for {self.world_size} ranks"
            )
        self._agree(request)
        batch = read_batch(Path(request.batch_file), request.batch_sha256)
        learner = self._learner(request, progress)
        progress.advance()
        torch.manual_seed(request.seed)
        first_step = StepProfiler(Path(request.profile)) if request.profile and takes_profile else None
        stats = self._train(learner, batch, request, progress, first_step=first_step)
        if first_step is not None and not stats:
            first_step.give_up(f"iteration {request.iteration} took no step: no group had an advantage")
        lr = learning_rate(learner.optimizer_step, settings, request.span()[0])
        metrics = summary(stats, len(batch), lr, time.perf_counter() - started) | batch.age()
        metrics |= by_source(stats, batch, settings)
        metrics["packed"] = float(learner.arrangement.packing.several)
        written_s = time.perf_counter()

        result = checkpoint.write(
            learner,
            Path(request.staging_dir),
            request,
            len(stats),
            metrics,
            self.saver,
            probe=probe_tokens(batch),
            progress=progress,
            copied=copied,
        )
        self.policy = result.policy
        size = sum(facts["bytes"] for facts in result.files.values())
        if self.rank == 0 and size > SAID_BYTES:
            seconds = time.perf_counter() - written_s
            print(f"checkpoint: {size / 1e9:.1f} GB written in {seconds:.1f} s", flush=True)
        if not settings.keep_alive:
            self.saver.finish()
        progress.advance()

    def _train(
        self,
        learner: Learner,
        batch: Batch,
        request: TrainRequest,
        progress: Progress,
        silent: bool = False,
        first_step: StepProfiler | None = None,
    ) -> list[StepStats]:
        if request.settings.needs_reference:
            learner.load_reference(Path(request.model_dir), request.settings)
        if batch.pictures and learner.pictures is None and request.images_dir is not None:
            pictures = RunPictures(Path(request.model_dir), Path(request.images_dir))
            learner.see(pictures, request.settings.share_prompts)
        return train(
            learner,
            batch,
            request.settings,
            max_tokens=request.max_tokens,
            span=request.span(),
            rank_weights=request.rank_weights,
            report=(lambda line: None) if self.rank or silent else (lambda line: print(line, flush=True)),
            progress=progress,
            first_step=first_step,
        )

    def _agree(self, request: TrainRequest) -> None:
        """Raise TrainingRequestRefused on all ranks unless all have the same phase; mounts may differ."""
        shared = request.model_dump_json(exclude=OF_A_NODE)
        number = int.from_bytes(hashlib.sha256(shared.encode()).digest()[:7], "big")
        bounds = torch.tensor([number, -number], dtype=torch.int64)
        with waiting_for_peers("agreeing on the request"):
            dist.all_reduce(bounds, dist.ReduceOp.MAX)
        if bounds[0] != -bounds[1]:
            raise TrainingRequestRefused(
                f"iteration {request.iteration}: the ranks were asked for different phases"
            )

    def _learner(self, request: TrainRequest, progress: Progress) -> Learner:
        """Return the policy to start from: the present one if it is the base, else the base is loaded."""

        def repeat(learner: Learner, done: TrainedBatch) -> None:
            batch = read_batch(Path(done.batch_file), done.batch_sha256)
            recorded = done.model_dump(include={"iteration", "iterations", "max_tokens"})
            as_then = request.model_copy(update={**recorded, "settings": done.settings})
            self._train(learner, batch, as_then, progress, silent=True)

        self.saver.finish()
        if self.learner is None or self.policy != request.base_policy:
            self.learner = None  # frees its memory before the next one is loaded
            self.learner = checkpoint.load(
                Path(request.base_dir),
                request.base_policy,
                self.device,
                request.settings,
                request.resume,
                repeat,
                model_dir=Path(request.model_dir),
                progress=progress,
            )
            self.policy = request.base_policy
        self.learner.to_device()
        self.learner.take_over_lead()
        return self.learner


def read_batch(path: Path, sha256: str) -> Batch:
    """Return the batch of `path`; raises DamagedBatch unless the file has this checksum and decodes."""
    data = files.read(path)
    actual = hashing.facts_of(data)["sha256"]
    if actual != sha256:
        raise DamagedBatch(f"{path} has sha256 {actual}, the request wants {sha256}; make the batch again")
    return Batch.decode(data)
