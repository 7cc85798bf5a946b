"""The policy in its layout: the logprobs of tokens, with sequences laid into rows as the model allows."""

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rollout.engines.short_model import short_model
from trainer.batch.packing import Microbatch
from trainer.model import attention, context, parallel
from trainer.model.arrangement import (
    Arrangement,
    allowed_error,
    find_arrangement,
    has_kernels,
    trial_rows,
)
from trainer.model.attention import Kernel
from trainer.model.loading import build_scorer
from trainer.model.packed_sequences import SequenceSeparation, decoder_inputs
from trainer.model.parallel import Layout, LayoutError
from trainer.model.pictures import PictureFault, RunPictures
from trainer.model.token_logprobs import Scorer
from trainer.peers import PeerLost, waiting_for_peers
from trainer.settings import TrainerSettings

logger = logging.getLogger(__name__)

SHORT_ROW = 64
"""Tokens of a row up to which torch's fused attention for CPUs takes longer than plain matrix products."""


ALONE = Layout()


class Policy:
    """A causal language model, and the one that it is held close to."""

    def __init__(self, scorer: Scorer, layout: Layout = ALONE) -> None:
        self.scorer = scorer
        self.model: Any = scorer.model
        """The transformers model, or peft's around it."""
        self.layout = layout
        self.device = scorer.device
        self.reference: Scorer | None = None
        self.arrangement = Arrangement()
        self.pictures: RunPictures | None = None
        """Where the pictures of batches are; needed for batches that have some."""
        self._is_divided = False
        """Whether the layout's context group divides the columns of rows."""

    def logprobs(self, microbatch: Microbatch, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Logprobs of the microbatch's trained tokens at their temperatures, and the entropies there; (N,)
        each.

        The entropies carry a gradient only with `entropy_gradient`. If sharded, all ranks call this together,
        also a rank with an empty microbatch.
        """
        return self._run(self.scorer, microbatch, entropy_gradient=entropy_gradient)

    @torch.no_grad()
    def reference_logprobs(self, microbatch: Microbatch) -> Tensor:
        """(N,) logprobs by the model that the policy is held close to; see load_reference."""
        if self.reference is not None:
            return self._run(self.reference, microbatch)[0]
        with self._without_adapters():
            return self._run(self.scorer, microbatch)[0]

    def _without_adapters(self) -> AbstractContextManager[Any]:
        if not hasattr(self.model, "disable_adapter"):
            raise ValueError(
                "trainer.kl needs a reference model; call load_reference with its directory first"
            )
        return self.model.disable_adapter()

    def load_reference(self, reference_dir: Path, settings: TrainerSettings) -> None:
        """Load the model of `reference_dir` as the reference, frozen, in the dtype of the computation.

        All ranks call this. With adapters it does nothing: the model without them is the reference.
        """
        if self.reference is None and not settings.lora.rank:
            plain = settings.model_copy(update={"activation_checkpointing": False})
            self.reference = build_scorer(
                reference_dir, self.device, plain, self.layout, self.scorer.computes_in
            )
            self.reference.requires_grad_(False)

    def _run(
        self,
        scorer: Scorer,
        microbatch: Microbatch,
        separation: SequenceSeparation | None = None,
        kernel: Kernel | None = None,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        separation = separation or self.arrangement.separation
        kernel = kernel or self.kernel(microbatch)
        divided = self._is_divided and len(microbatch.targets) > 0
        if divided:
            microbatch = context.padded(microbatch, self.layout.context_parallel)
        scored_at, targets = (
            torch.from_numpy(array).to(self.device) for array in (microbatch.scored_at, microbatch.targets)
        )
        pictures = None
        if microbatch.pictures is not None:
            if self.pictures is None:
                raise ValueError("the batch has pictures, and the request does not say where they are")
            pictures = self.pictures.placed(microbatch)
        scorer.use(kernel if len(targets) else Kernel.OWN, divided)
        if len(targets):
            inputs = decoder_inputs(
                microbatch,
                separation,
                kernel,
                scorer.config,
                self.device,
                divided,
                pictures.is_place(microbatch.token_ids.shape) if pictures else None,
            )
        elif self.layout.sharded:
            # This rank must help to gather the layers. It passes one token, which is not scored.
            nothing = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
            inputs = {"input_ids": nothing, "position_ids": nothing}
        else:
            return torch.zeros(0, device=self.device), torch.zeros(0, device=self.device)
        if scorer.routes is not None:  # until the next call: a backward pass may compute this one again
            routes = microbatch.routes if len(targets) else None
            scorer.routes.replayed = (
                None if routes is None else torch.from_numpy(routes).flatten(0, 1).to(self.device)
            )
        if self.device.type == "cpu":  # the backward pass uses the same kernel
            torch.backends.cuda.enable_flash_sdp(inputs["input_ids"].shape[1] > SHORT_ROW)
        temperatures = None  # most batches are sampled at 1: then the logits are neither copied nor divided
        if (microbatch.temperatures != 1).any():
            temperatures = torch.from_numpy(microbatch.temperatures).to(self.device)
        index = None
        if divided:
            inputs, scored_at, index = context.own_block(
                inputs, microbatch.scored_at, self.device, self.layout
            )
            targets = targets[index]
            temperatures = None if temperatures is None else temperatures[index]
        try:
            scores = scorer(inputs, scored_at, targets, temperatures, entropy_gradient, pictures)
            if index is None:
                return scores
            return context.joined(scores, index, len(microbatch.targets), self.layout)
        finally:
            if self.layout.sharded and not torch.is_grad_enabled():
                # FSDP keeps the root's whole weights for a backward pass, and would miss a change of the
                # shards; so it would with all layers where a model has refused its arguments.
                parallel.reshard(scorer)

    def kernel(self, microbatch: Microbatch) -> Kernel:
        """Return the Kernel that computes the attention of a microbatch."""
        return attention.choose_kernel(
            self.device.type,
            self.arrangement.works,
            shared=microbatch.segments is not None,
            several=microbatch.is_packed or self._is_divided,
            columns=microbatch.token_ids.shape[1],
        )

    def arrange(self, share_prompts: bool) -> None:
        """Find out how the model's sequences can be laid into rows, and what may compute their attention.
        Collective; see trainer.model.arrangement.

        Each rank tries a short model alone, if there is one. Where that tells nothing, or not the same to
        all ranks, they try the whole model together.
        """
        fewest, most = self._extremes(has_kernels())
        kernels = fewest == most > 0
        arrangement = None if self.pictures else self._arrange_short(share_prompts, kernels)
        least, largest = self._extremes(arrangement.number if arrangement else 0)
        if arrangement is None or least != largest:
            arrangement = self._try(
                self.scorer, lambda passes: self._extremes(int(passes))[0] == 1, share_prompts, kernels
            )
        self.arrangement = arrangement
        if self.layout.rank == 0:
            logger.info("%s", self.arrangement)
        if self.layout.context_parallel > 1:
            self._divide_rows()

    def see(self, pictures: RunPictures, share_prompts: bool) -> None:
        """Show the pictures of batches from now on. Collective, as arrange, which is done again with one.
        Raises PictureFault if the model cannot be shown any, or not by this layout.
        """
        for name in ("tensor_parallel_size", "context_parallel"):
            if (ranks := getattr(self.layout, name)) > 1:
                raise PictureFault(f"trainer.{name}={ranks} does not go with pictures of samples; give 1")
        self.pictures = pictures
        try:
            self.arrange(share_prompts)
        except PeerLost:
            raise
        except Exception as error:  # any family may refuse any argument in any way
            name, reason = type(self.scorer.causal).__name__, attention.brief(error)
            raise PictureFault(f"a {name} cannot be shown pictures: {reason}") from error

    @torch.no_grad()
    def _divide_rows(self) -> None:
        """Divide columns over the context group from now on. Raises LayoutError if that changes scores."""
        context.register(self.layout)
        ranks, causal = self.layout.context_parallel, self.scorer.causal
        for microbatch in trial_rows(self.scorer.config.vocab_size, self.arrangement):
            columns = microbatch.token_ids.shape[1]
            words = microbatch.token_ids.copy()
            words[:, : columns // ranks] = words[:, : columns // ranks][:, ::-1]
            self._is_divided = False
            plain, changed = (
                self._run(self.scorer, replace(microbatch, token_ids=ids))[0]
                for ids in (microbatch.token_ids, words)
            )
            later = torch.from_numpy(microbatch.scored_at % columns >= columns // ranks)
            effect = float((changed - plain)[later].abs().max())
            self._is_divided = True
            try:
                error = float((self._run(self.scorer, microbatch)[0] - plain).abs().max())
                reason = f"scores are wrong by {error:.1e}, as with recurrent layers"
            except PeerLost:
                raise
            except Exception as failure:  # any family may refuse any argument in any way
                error, reason = math.inf, attention.brief(failure)
            if not error <= allowed_error(effect, self.scorer.computes_in == torch.float32):
                raise LayoutError(
                    f"trainer.context_parallel={ranks} and {type(causal).__name__}: {reason}; use 1"
                )

    def _arrange_short(self, share_prompts: bool, kernels: bool) -> Arrangement | None:
        """Return the Arrangement that a short model finds; None if there is no short model, or if it tells
        nothing.
        """
        dtype = self.scorer.computes_in
        parameter_bytes = sum(parallel.local_part(parameter).nbytes for parameter in self.model.parameters())
        short = short_model(self.scorer.causal, dtype, self.device, parameter_bytes)
        if short is None:
            return None
        try:
            arrangement = self._try(
                Scorer(short, self.device, computes_in=dtype), bool, share_prompts, kernels
            )
        except Exception as error:  # what the whole model may raise too, and then all ranks raise it
            logger.debug("the short model cannot be tried: %s", error)
            return None
        return arrangement if arrangement.is_told else None

    def _try(
        self, scorer: Scorer, agree: Callable[[bool], bool], share_prompts: bool, kernels: bool
    ) -> Arrangement:
        ranks = self.layout.tensor_parallel_size
        return find_arrangement(
            scorer.config,
            lambda microbatch, way, kernel: self._run(scorer, microbatch, way, kernel)[0].float().cpu(),
            agree,
            share_prompts=share_prompts,
            kernels=kernels,
            exact=scorer.computes_in == torch.float32,
            layers=scorer.causal.modules(),
            attention=attention.candidates(scorer.causal, self.device),
            failure=lambda kernel: attention.failure(
                kernel, scorer.config, ranks, self.device, scorer.computes_in
            ),
            picture=self.pictures.example.token_ids if self.pictures else (),
        )

    def _extremes(self, number: int) -> tuple[int, int]:
        """Return the least and the largest of the ranks' numbers."""
        bounds = torch.tensor([-number, number], dtype=torch.int64)
        if self.layout.world_size > 1:
            with waiting_for_peers("agreeing on how sequences are laid into rows"):
                dist.all_reduce(bounds, dist.ReduceOp.MAX)
        return -int(bounds[0]), int(bounds[1])
