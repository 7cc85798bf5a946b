"""The whole idea in one file, for a reader: reinforcement learning that a kill at any moment cannot harm.

    .venv/bin/python -m scripts.minimal --log-path runs/minimal

One process plays every part: it generates, scores and trains. It remembers nothing but what its directory
holds:

    iteration_0003/group_0017.safetensors    the samples of one task, with their rewards
    iteration_0003/checkpoint/               the policy that was trained on them, and the optimizer's state

Both appear whole or not at all, and what is there is never made again. So after a kill the same command goes
on where the files end, and ends with the same weights to the bit: a sample follows from the run's seed, its
iteration, its task and its policy, not from what was drawn before. A run of several nodes is this with the
groups of an iteration split among them (coordinator/), with vLLM in place of the engine (rollout/), and with
torchrun around `train` (trainer/).

Shapes: an iteration has G groups of S samples, N = G * S sequences, which are padded to T tokens.
"""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load, save
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from rollout.engines.embedded.batch import Generation
from rollout.engines.embedded.engine import EmbeddedEngine
from rollout.rewards.builtin import exact
from rollout.storage import files
from rollout.storage.writer import publish_directory
from rollout.tasks.task_set import Task, group_seed, load_tasks, task_order
from trainer.batch.advantages import group_advantages
from trainer.model.tiny import build

SEED, STATE = 1, "optimizer.pt"
GROUPS, SAMPLES, MAX_TOKENS, TEMPERATURE = 64, 8, 8, 1.0
LEARNING_RATE, STEPS, CLIP_LOW, CLIP_HIGH, CORRECTION_CAP = 3e-4, 2, 0.2, 0.28, 2.0

Group = dict[str, np.ndarray]
"""token_ids (S, T) int64, mask (S, T) uint8, logprobs (S, T) float32, rewards (S,) float32.

The mask is 1 for tokens that the policy has drawn: those are trained, the prompt and the padding are not. A
logprob is the engine's, natural, of the token at its own place.
"""


def rollout(
    engine: EmbeddedEngine, tokenizer: Any, tasks: list[Task], iteration: int, where: Path
) -> list[Group]:
    """Make the groups of an iteration that are not there yet, and return all of them, in order."""
    paths = [where / f"group_{slot:04d}.safetensors" for slot in range(len(tasks))]
    asked: dict[int, Generation] = {}
    for slot, task in enumerate(tasks):
        if not paths[slot].exists():
            asked[slot] = Generation(
                tokenizer.encode(task["prompt"]), n=SAMPLES, max_tokens=MAX_TOKENS, temperature=TEMPERATURE,
                top_p=1.0, stop=(), seed=group_seed(SEED, "train", iteration, slot),
            )  # fmt: skip
            engine.submit(asked[slot])
    for slot, generation in asked.items():
        group = _scored(generation, tokenizer, tasks[slot])
        files.publish(paths[slot], save(group))  # under another name, fsync, rename: whole or not there
    return [load(path.read_bytes()) for path in paths]


def _scored(generation: Generation, tokenizer: Any, task: Task) -> Group:
    rows = generation.future.result()
    prompt, length = generation.prompt_ids, len(generation.prompt_ids) + MAX_TOKENS
    group: Group = {
        "token_ids": np.zeros((SAMPLES, length), np.int64),
        "mask": np.zeros((SAMPLES, length), np.uint8),
        "logprobs": np.zeros((SAMPLES, length), np.float32),
        "rewards": np.zeros(SAMPLES, np.float32),
    }
    for j, row in enumerate(rows):
        end = len(prompt) + len(row.token_ids)
        group["token_ids"][j, :end] = (
            prompt + row.token_ids
        )  # the engine's ids: text is never tokenised again
        group["mask"][j, len(prompt) : end] = 1  # the end of the sequence too, where the policy has drawn it
        group["logprobs"][j, len(prompt) : end] = row.logprobs
        group["rewards"][j] = exact(task, tokenizer.decode(row.token_ids, skip_special_tokens=True))
    return group


def token_logprobs(model: Any, token_ids: Tensor) -> Tensor:
    """Return (N, T) logprobs of the tokens at the sampling temperature; 0 for the first one."""
    logits = model(input_ids=token_ids).logits / TEMPERATURE  # (N, T, V)
    logprobs = logits[:, :-1].log_softmax(-1)  # the logits at place t score token t + 1
    return pad(logprobs.gather(-1, token_ids[:, 1:, None]).squeeze(-1), (1, 0))


def train(policy: Path, groups: list[Group], checkpoint: Path) -> None:
    """Train `policy` on an iteration's groups, and publish the result as `checkpoint`."""
    model: Any = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    if (state := policy / STATE).exists():
        optimizer.load_state_dict(torch.load(state))
    longest = max(group["mask"].shape[1] for group in groups)

    def stacked(name: str) -> Tensor:  # (N, T), of the groups that teach something
        parts = [torch.from_numpy(group[name]) for group, _ in teaching]
        return torch.cat([pad(part, (0, longest - part.shape[1])) for part in parts])

    # A group without a difference in its rewards does not say which sample was better.
    pairs = [(group, group_advantages(group["rewards"])) for group in groups]
    teaching = [(group, values) for group, values in pairs if values is not None]
    if teaching:
        token_ids, mask = stacked("token_ids"), stacked("mask").bool()
        engine_logprobs = stacked("logprobs")
        advantages = torch.cat([torch.from_numpy(values) for _, values in teaching]).float()[
            :, None
        ]  # (N, 1)
        with torch.no_grad():
            old_logprobs = token_logprobs(model, token_ids)  # of the policy before its first step
        # The engine's numbers differ a little from the trainer's: importance sampling corrects that.
        correction = torch.exp(old_logprobs - engine_logprobs).clamp(max=CORRECTION_CAP)
        for chosen in torch.arange(len(token_ids)).chunk(STEPS):
            ratio = torch.exp(token_logprobs(model, token_ids[chosen]) - old_logprobs[chosen])
            clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
            objective = torch.minimum(ratio * advantages[chosen], clipped * advantages[chosen])
            loss = -(correction[chosen] * objective)[
                mask[chosen]
            ].mean()  # every token of a step weighs the same
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    with TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        AutoTokenizer.from_pretrained(policy).save_pretrained(saved)
        torch.save(optimizer.state_dict(), Path(saved) / STATE)
        publish_directory(Path(saved), checkpoint)  # by one rename: the next iteration begins with it


def run(root: Path, iterations: int, warm_up_steps: int) -> None:
    """Run the iterations that `root` does not hold yet."""
    policy = root / "model"
    if not policy.exists():
        build(SEED, warm_up_steps, policy)
    tasks = load_tasks("builtin:arithmetic", seed=SEED, split="train").tasks
    tokenizer: Any = AutoTokenizer.from_pretrained(policy)
    # In float64 a sample does not depend on its neighbours, which are others after a restart.
    engine = EmbeddedEngine(policy, dtype=torch.float64, max_batch=GROUPS * SAMPLES)
    engine.start()
    for iteration in range(1, iterations + 1):
        where = root / f"iteration_{iteration:04d}"
        checkpoint = where / "checkpoint"
        if not checkpoint.exists():
            files.make_directory(where)
            engine.reload(policy).result()
            order = task_order(len(tasks), SEED, (iteration - 1) * GROUPS, GROUPS)
            groups = rollout(engine, tokenizer, [tasks[index] for index in order], iteration, where)
            train(policy, groups, checkpoint)
            reward = float(np.mean([group["rewards"] for group in groups]))
            print(json.dumps({"iteration": iteration, "reward": round(reward, 3)}), flush=True)
        policy = checkpoint


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.minimal", description="RL on one node, in one file."
    )
    parser.add_argument("--log-path", type=Path, required=True, help="the directory of the run")
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument(
        "--warm-up-steps", type=int, default=800, help="of the built-in model, before all that"
    )
    args = parser.parse_args()
    disable_progress_bar()
    args.log_path.mkdir(parents=True, exist_ok=True)
    run(args.log_path, args.iterations, args.warm_up_steps)


if __name__ == "__main__":
    main()
