"""Sequences of a row do not see each other, whatever the model is; prompts are shared where that is right."""

import inspect
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations import hub_kernels
from transformers.masking_utils import create_chunked_causal_mask, create_masks_for_generate
from transformers.utils.import_utils import ENV_VARS_TRUE_VALUES

from rollout.engines.short_model import short_model
from scripts.tiny_models import WINDOW, make_batch, tiny_config
from tests.paths import REPOSITORY
from trainer.batch.batch import Batch
from trainer.batch.packing import Bundle, Microbatch, Packing, fill, plan_step
from trainer.job import launch
from trainer.model import packed_sequences, policy
from trainer.model.arrangement import Arrangement, find_arrangement
from trainer.model.attention import Kernel
from trainer.model.learner import Learner
from trainer.model.packed_sequences import SequenceSeparation
from trainer.model.token_logprobs import Scorer, UnsupportedModel

CPU = torch.device("cpu")

makes_chunks = pytest.mark.skipif(
    "block_sequence_ids" not in inspect.signature(create_chunked_causal_mask).parameters,
    reason="this transformers cannot make the masks of chunked attention",
)


def learner_of(family: str, attention: str | None = None, **more: Any) -> Learner:
    torch.manual_seed(0)
    kwargs = {"attn_implementation": attention} if attention else {}
    model = AutoModelForCausalLM.from_config(tiny_config(family, **more), **kwargs).float()
    learner = Learner(Scorer(model, CPU))
    learner.arrange(share_prompts=True)
    return learner


def found(learner: Learner) -> tuple[str, bool]:
    """What keeps sequences apart, and whether prompts are shared."""
    arrangement = learner.arrangement
    return (
        arrangement.separation.value if arrangement.packing.several else "one a row",
        arrangement.packing.pairs_per_token > 0,
    )


@pytest.fixture(scope="module")
def batch() -> Batch:
    batch = make_batch()
    assert batch.input_tokens.max() > 3 * WINDOW
    return batch


def by_token(learner: Learner, microbatches: list[Microbatch]) -> dict[tuple[int, float], float]:
    """Logprobs by (token, engine logprob), a pair that is unique in the batch."""
    scores: dict[tuple[int, float], float] = {}
    for one in microbatches:
        keys = zip(one.targets.tolist(), one.engine_logprobs.tolist(), strict=True)
        scores |= dict(zip(keys, learner.logprobs(one)[0].tolist(), strict=True))
    return scores


@torch.no_grad()
def error(learner: Learner, batch: Batch, microbatches: list[Microbatch]) -> float:
    """The largest difference from the logprobs of each sequence in a microbatch of its own."""
    alone = [fill(batch, [[Bundle([k], int(batch.input_tokens[k]))]]) for k in range(len(batch))]
    wanted, scores = by_token(learner, alone), by_token(learner, microbatches)
    assert wanted.keys() == scores.keys()
    return max(abs(wanted[key] - scores[key]) for key in wanted)


def planned(learner: Learner, batch: Batch) -> list[Microbatch]:
    return plan_step(batch, range(len(batch)), [1.0], 0, 400, learner.arrangement.packing)


def packed_tight(batch: Batch) -> list[Microbatch]:
    """All in two rows, without shared prompts."""
    ones = [Bundle([k], int(batch.input_tokens[k])) for k in range(len(batch))]
    return [fill(batch, [ones[::2], ones[1::2]])]


@pytest.mark.parametrize(
    ("family", "way"),
    [
        ("qwen3", ("positions", True)),
        ("gpt2", ("positions", True)),
        ("qwen3_moe", ("positions", True)),
        pytest.param("mistral", ("positions", True), id="a window in every layer"),
        pytest.param("gemma3_text", ("positions", True), id="a window in some layers"),
        pytest.param("llama4_text", ("positions", True), id="chunks", marks=makes_chunks),
        pytest.param("gpt_oss", ("masks", True), id="windows and masks that ignore positions"),
        pytest.param("opt", ("masks", True), id="positions counted from the mask"),
        pytest.param("mpt", ("masks", False), id="biases by distance in the row"),
        pytest.param("bloom", ("one a row", False), id="positions in the mask"),
        pytest.param("qwen3_next", ("one a row", False), id="recurrent and attention layers"),
        pytest.param("falcon_h1", ("one a row", False), id="both in each layer"),
        pytest.param("lfm2", ("one a row", False), id="convolutions"),
        pytest.param("mamba2", ("one a row", False), id="recurrent layers alone"),
    ],
)
def test_batch_scores_as_its_sequences_do_alone(family: str, way: tuple[str, bool], batch: Batch) -> None:
    learner = learner_of(family)
    assert found(learner) == way
    plan = planned(learner, batch)
    assert any(one.segments is not None for one in plan) == way[1]
    assert error(learner, batch, plan) < 1e-4
    if way[0] != "one a row":
        assert error(learner, batch, packed_tight(batch)) < 1e-4
    else:
        assert all((one.position_ids == np.arange(one.position_ids.shape[1])).all() for one in plan)
        assert error(learner, batch, packed_tight(batch)) > 0.01, "it would do without"


def test_window_that_cannot_be_shortened_for_the_trial_is_not_trusted(batch: Batch) -> None:
    """Layers have taken it when they were made. Below it everything scores alike."""
    assert found(learner_of("doge")) == ("one a row", False)
    learner = learner_of("gpt_neo", window_size=40)
    assert found(learner) == ("one a row", False)
    assert error(learner, batch, planned(learner, batch)) < 1e-4
    groups = [np.flatnonzero(batch.groups == group).tolist() for group in range(3)]
    shared = [Bundle(k, 16 + int((batch.input_tokens[k] - 16).sum()), 16) for k in groups]
    assert error(learner, batch, [fill(batch, [[one]]) for one in shared]) > 0.01, "it would do to share"


def test_gradient_is_the_same_with_masks_by_kind_of_layer(batch: Batch) -> None:
    learner = learner_of("gpt_oss")
    parameters = list(learner.parameters.values())

    def gradients(microbatches: list[Microbatch]) -> list[Tensor]:
        for parameter in parameters:
            parameter.grad = None
        for one in microbatches:
            weights = torch.from_numpy(one.engine_logprobs)  # unlike for each token
            (learner.logprobs(one)[0] * weights).sum().backward()
        return [p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in parameters]

    alone = gradients([fill(batch, [[Bundle([k], int(batch.input_tokens[k]))]]) for k in range(len(batch))])
    together = gradients(planned(learner, batch))
    scale = max(float(gradient.abs().max()) for gradient in alone)
    for mine, theirs in zip(together, alone, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4 * scale)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_mask_is_of_the_kind_that_the_attention_takes(attention: str) -> None:
    assert found(learner_of("qwen3", attention)) == ("positions", True)


@pytest.mark.parametrize(
    "family", ["qwen3", "mistral", "gemma3_text", "gpt_oss", pytest.param("llama4_text", marks=makes_chunks)]
)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_masks_are_those_that_transformers_makes_from_positions(family: str, attention: str) -> None:
    config = tiny_config(family, attn_implementation=attention)
    positions = torch.cat([torch.arange(30), torch.arange(5), torch.arange(20)])[None]
    own = (positions == 0).cumsum(1)
    ours = packed_sequences.attention_masks(torch.stack([own, own]), positions, config)
    theirs: Any = create_masks_for_generate(config, torch.zeros(1, 55, 0), None, None, positions)
    if not isinstance(ours, dict):
        ours, theirs = {"": ours}, {"": theirs}
    for kind, mask in theirs.items():
        assert torch.equal(ours[kind].bool(), mask.bool()), kind
    assert len(theirs) == len(set(getattr(config, "layer_types", [""])))


def test_each_token_sees_its_prompt_and_its_own_sequence() -> None:
    own = torch.tensor([[0, 0, 1, 2, 2, 3]])  # a prompt of two, a sequence of one and of two, another alone
    before = torch.tensor([[0, 0, 0, 0, 0, 3]])
    positions = torch.tensor([[0, 1, 2, 2, 3, 0]])
    mask = packed_sequences.attention_masks(
        torch.stack([own, before]), positions, tiny_config("llama", attn_implementation="sdpa")
    )
    assert mask.shape == (1, 1, 6, 6)
    rows = ["".join(str(int(seen)) for seen in row) for row in mask[0, 0]]
    assert rows == ["100000", "110000", "111000", "110100", "110110", "000001"]
    narrow = tiny_config("mistral", sliding_window=2, attn_implementation="sdpa")
    mask = packed_sequences.attention_masks(torch.stack([own, before]), positions, narrow)
    rows = ["".join(str(int(seen)) for seen in row) for row in mask[0, 0]]
    assert rows == ["100000", "110000", "011000", "010100", "000110", "000001"], "by positions, not columns"


def test_window_longer_than_any_sequence_tried_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that forgets the window is noticed, although the model's own is longer than what is tried."""
    everything = packed_sequences.attention_masks

    def forgets(segments: Tensor, position_ids: Tensor, config: Any) -> Any:
        masks = everything(segments, position_ids, config)
        return dict.fromkeys(masks, masks["full_attention"])

    assert found(learner_of("gemma3_text", sliding_window=4096)) == ("positions", True)
    monkeypatch.setattr(packed_sequences, "attention_masks", forgets)
    assert found(learner_of("gemma3_text", sliding_window=4096)) == ("positions", False)
    assert found(learner_of("gpt_oss", sliding_window=4096)) == ("one a row", False)


def test_trying_leaves_the_model_as_it_was() -> None:
    learner = learner_of("gpt_oss", sliding_window=100)
    assert learner.scorer.config.sliding_window == 100
    assert all(
        parameter.grad is None or not parameter.grad.any() for parameter in learner.parameters.values()
    )


def test_model_that_looks_ahead_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="a bert model sees the tokens that it is to predict"):
        learner_of("bert")


def test_way_that_fails_on_one_rank_is_not_taken_on_any(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = learner_of("qwen3")
    # kernels; no short model; is telling; positions; masks; shared; split attention on its own, in the model
    ranks = iter([(0, 0), (0, 0), (1, 1), (0, 1), (1, 1), (0, 1), (1, 1), (0, 1)])
    monkeypatch.setattr(Learner, "_extremes", lambda self, number: next(ranks))
    learner.arrange(share_prompts=True)
    assert found(learner) == ("masks", False) and next(ranks, None) is None
    assert learner.arrangement.kernels == {Kernel.SPLIT: "it fails on another rank"}


@pytest.mark.parametrize(
    ("broken", "share_prompts", "shares", "tried"),
    [
        ((), True, True, "varlen, flex"),
        ((), False, False, "varlen"),
        ((Kernel.FLEX,), True, False, "varlen, flex"),
        ((Kernel.VARLEN,), False, False, "varlen, flex"),
        ((Kernel.VARLEN, Kernel.FLEX), True, True, "varlen, flex"),
    ],
)
def test_kernels_of_a_gpu_are_tried_only_if_used_and_prompts_shared_only_by_a_fast_one(
    broken: tuple[Kernel, ...], share_prompts: bool, shares: bool, tried: str
) -> None:
    learner, by_flex = learner_of("qwen3"), []

    def score(microbatch: Microbatch, apart: SequenceSeparation, kernel: Kernel) -> Tensor:
        by_flex.extend([microbatch.segments is not None] * (kernel is Kernel.FLEX))
        return learner._run(learner.scorer, microbatch, apart, Kernel.OWN)[0]

    arrangement = find_arrangement(
        learner.scorer.config,
        score,
        bool,
        share_prompts=share_prompts,
        kernels=False,
        exact=True,
        attention=[Kernel.VARLEN, Kernel.FLEX],
        failure=lambda kernel: "it is broken" if kernel in broken else "",
    )
    assert (arrangement.packing.pairs_per_token > 0) == shares
    assert ", ".join(kernel.value for kernel in arrangement.kernels) == tried
    assert (False in by_flex) == (Kernel.VARLEN in broken and Kernel.FLEX not in broken)


DEEP: dict[str, dict[str, Any]] = {
    "qwen3": {"num_hidden_layers": 6},
    "gpt_oss": {"num_hidden_layers": 6},
    "gemma3_text": {"num_hidden_layers": 14, "sliding_window": 4096},
    "qwen3_next": {"num_hidden_layers": 10},
    "bamba": {"num_hidden_layers": 6, "attn_layer_indices": [1, 4]},
    "opt": {"num_hidden_layers": 6},
}


def of_whole(learner: Learner, monkeypatch: pytest.MonkeyPatch) -> Arrangement:
    """What trying the whole model tells."""
    with monkeypatch.context() as patched:
        patched.setattr(policy, "short_model", lambda *_: None)
        learner.arrange(share_prompts=True)
    return learner.arrangement


def deep_learner(family: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Learner, list[int]]:
    """A learner that was not arranged yet, and a list that grows whenever its whole model computes."""
    torch.manual_seed(0)
    more = {} if family in ("bamba", "opt") else {"layer_types": None}
    model = AutoModelForCausalLM.from_config(tiny_config(family, **more, **DEEP[family])).float()
    learner = Learner(Scorer(model, CPU))
    calls: list[int] = []
    learner.scorer.register_forward_pre_hook(lambda *_: calls.append(1))
    return learner, calls


@pytest.mark.parametrize("family", DEEP)
def test_first_layers_of_a_deep_model_tell_the_same_as_all(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, calls = deep_learner(family, monkeypatch)
    learner.arrange(share_prompts=True)
    told = learner.arrangement
    assert not calls and told.is_told
    whole = of_whole(learner, monkeypatch)
    assert calls and told == whole and told.number == whole.number


def test_first_layers_that_tell_nothing_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, calls = deep_learner("qwen3", monkeypatch)

    def deaf(*given: Any) -> Any:
        assert given[3] == 4 * sum(parameter.numel() for parameter in learner.parameters.values())
        short: Any = short_model(*given)
        for layer in short.model.layers:
            layer.self_attn.o_proj.weight.data.zero_()
        return short

    monkeypatch.setattr(policy, "short_model", deaf)
    learner.arrange(share_prompts=True)
    assert calls and found(learner) == ("positions", True)


def test_first_layers_that_cannot_be_scored_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, calls = deep_learner("qwen3", monkeypatch)

    def broken(*given: Any) -> Any:
        short: Any = short_model(*given)
        short.model.norm = None
        return short

    monkeypatch.setattr(policy, "short_model", broken)
    learner.arrange(share_prompts=True)
    assert calls and found(learner) == ("positions", True)


def test_ranks_whose_first_layers_tell_different_things_try_all_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learner, calls = deep_learner("qwen3", monkeypatch)
    extremes = Learner._extremes
    monkeypatch.setattr(
        Learner, "_extremes", lambda self, number: (0, number) if number > 1 else extremes(self, number)
    )
    learner.arrange(share_prompts=True)
    assert calls and found(learner) == ("positions", True)


def test_arrangements_have_one_number_where_they_are_used_alike() -> None:
    plain = Arrangement(kernels={Kernel.SPLIT: ""})
    others = [
        Arrangement(),
        replace(plain, separation=SequenceSeparation.MASKS),
        replace(plain, packing=Packing(several=False)),
        replace(plain, packing=Packing(pairs_per_token=6.0)),
    ]
    assert len({one.number for one in [plain, *others]}) == 5 and min(one.number for one in others) > 0
    words = [replace(plain, kernels={Kernel.SPLIT: reason}) for reason in ("it is wrong by 1", "by 2")]
    assert words[0].number == words[1].number == Arrangement().number


def test_model_that_heeds_no_context_yet_is_not_packed(batch: Batch) -> None:
    """Nothing shows in it now, but its layers may leak as soon as they are trained."""
    learner = learner_of("mamba2")
    with torch.no_grad():
        for name, parameter in learner.parameters.items():
            if "out_proj" in name:
                parameter.zero_()
    assert error(learner, batch, packed_tight(batch)) < 1e-5
    learner.arrange(share_prompts=True)
    assert found(learner) == ("one a row", False)


def test_log_says_how_rows_are_laid(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        learner_of("mamba2")
        learner_of("qwen3")
    assert [record.message for record in caplog.records if "rows hold" in record.message] == [
        "rows hold one sequence and padding, because layers of this model may see the sequence before; "
        "prompts are not shared; attention: own",
        "rows hold several sequences, kept apart by positions; prompts are shared; attention: own, split",
    ]


KERNELS = Path(__file__).with_name("stand_in_kernels.py")


def test_kernels_that_take_bounds_get_them() -> None:
    """In a process of its own: transformers looks for kernels when it is imported."""
    families = ("qwen3_5_text", "qwen3_next", "lfm2")
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, KERNELS, *families], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [way for way, _error in lines] == ["kernels"] * len(families)
    assert max(float(worst) for _way, worst in lines) < 1e-4


def test_training_processes_fetch_no_kernels_from_the_hub() -> None:
    """The variable's name is transformers' own; it reads it when it is imported."""
    plan = SimpleNamespace(threads=1, interface="lo", spool=Path("spool"), gpus=None)
    told = launch.environment(plan)["USE_HUB_KERNELS"]  # pyright: ignore[reportArgumentType]
    assert os.environ.get("USE_HUB_KERNELS", "YES") == hub_kernels._TRANSFORMERS_USE_HUB_KERNELS
    assert told not in ENV_VARS_TRUE_VALUES
