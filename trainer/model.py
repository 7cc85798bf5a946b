"""The policy in training: a causal language model, its optimizer, the logprobs of tokens."""

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from trainer.packing import Microbatch
from trainer.settings import TrainerSettings

# Elements of a float32 softmax that may exist at once: 256 MiB.
CHUNK_ELEMENTS = 1 << 26
# Statistics of an optimizer step: loss, KL, clip fraction, entropy.
NUM_SUMS = 4


class Learner:
    """What lives on between training phases: fp32 master weights, AdamW's moments, the number of steps taken.

    The gradients of all parameters are views of `gradients`, which with `sums`, room for a step's
    statistics, is the flat tensor `summed`: adding everything up over the ranks is one call.
    """

    def __init__(self, model: Any, optimizer_step: int = 0) -> None:
        """`model` is a transformers causal LM with float32 parameters on the device that is to train it."""
        model.eval()  # dropout off; nothing else differs in the models that we train
        self.model = model
        self.parameters: dict[str, Tensor] = dict(model.named_parameters())  # tied ones once
        self.optimizer = AdamW(_decay_groups(self.parameters), fused=True)
        self.optimizer_step = optimizer_step
        sizes = [parameter.numel() for parameter in self.parameters.values()]
        self.device = next(iter(self.parameters.values())).device
        self.summed = torch.zeros(sum(sizes) + NUM_SUMS, device=self.device)
        self.gradients, self.sums = self.summed.split([sum(sizes), NUM_SUMS])
        for parameter, flat in zip(self.parameters.values(), self.gradients.split(sizes), strict=True):
            parameter.grad = flat.view_as(parameter)

    def logprobs(self, microbatch: Microbatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Of the microbatch's trained tokens, (N,) each: logprobs at `temperature`, and the entropies there.

        The entropy is a statistic and carries no gradient.
        """
        if not len(microbatch.targets):
            return torch.zeros(0, device=self.device), torch.zeros(0, device=self.device)
        return token_logprobs(
            self.model,
            torch.from_numpy(microbatch.token_ids).to(self.device),
            torch.from_numpy(microbatch.position_ids).to(self.device),
            torch.from_numpy(microbatch.scored_at).to(self.device),
            torch.from_numpy(microbatch.targets).to(self.device),
            temperature,
        )

    def apply(self, settings: TrainerSettings) -> float:
        """One AdamW step from `gradients`; returns the learning rate it took."""
        lr = learning_rate(self.optimizer_step, settings)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            group["betas"] = settings.betas
            group["weight_decay"] = settings.weight_decay if group["decays"] else 0.0
        self.optimizer.step()
        self.optimizer_step += 1
        return lr


def learning_rate(optimizer_step: int, settings: TrainerSettings) -> float:
    """Of the step after `optimizer_step` steps of the whole run: a linear warm-up, then constant."""
    return settings.learning_rate * min(1.0, (optimizer_step + 1) / max(1, settings.warmup_steps))


def load_model(model_dir: Path, device: torch.device) -> Any:
    """The causal LM of a Hugging Face directory, in float32 whatever it was saved in."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        model_dir,
        dtype=torch.float32,
        # The flash_attention_2 of transformers ignores restarting positions where there are several rows.
        attn_implementation="sdpa",
        local_files_only=True,
    )
    return model.to(device)


def token_logprobs(
    model: Any,
    token_ids: Tensor,
    position_ids: Tensor,
    scored_at: Tensor,
    targets: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Logprobs of `targets` (N,) and entropies (N,) at `temperature`, from the logits at `scored_at` (N,).

    `token_ids` and `position_ids` are (R, C); `scored_at` indexes the flattened R x C positions, and a
    logit at position t scores the token at t + 1. No attention mask: see trainer.packing.
    """
    on_gpu = token_ids.device.type == "cuda"
    with torch.autocast("cuda", torch.bfloat16) if on_gpu else nullcontext():
        logits = model(input_ids=token_ids, position_ids=position_ids, use_cache=False).logits
    scoring = logits.flatten(0, 1)[scored_at]
    rows = max(1, CHUNK_ELEMENTS // scoring.shape[-1])
    if len(scoring) <= rows:
        return _score(scoring, targets, temperature)
    # Chunk by chunk, computed again in the backward pass, so that only one softmax exists at a time.
    chunks = [
        checkpoint(_score, logits_chunk, targets_chunk, temperature, use_reentrant=False)
        for logits_chunk, targets_chunk in zip(scoring.split(rows), targets.split(rows), strict=True)
    ]
    return torch.cat([chunk[0] for chunk in chunks]), torch.cat([chunk[1] for chunk in chunks])


def _score(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Logprobs of `targets` (N,) and entropies (N,) under `logits` (N, vocabulary) / temperature."""
    log_p = torch.log_softmax(logits.float() / temperature, dim=-1)
    with torch.no_grad():
        entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], entropy


def _decay_groups(parameters: dict[str, Tensor]) -> Iterable[dict[str, Any]]:
    """AdamW's groups: matrices decay, norms and biases (one-dimensional) do not."""
    matrices = [parameter for parameter in parameters.values() if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters.values() if parameter.ndim <= 1]
    return [{"params": params, "decays": d} for params, d in ((matrices, True), (vectors, False)) if params]
