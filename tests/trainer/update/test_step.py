import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout.trajectory import Group
from trainer.batch.batch import Batch
from trainer.batch.building import ReplayedGroups, build_batch
from trainer.batch.packing import Bundle, fill
from trainer.documents import TrainRequest
from trainer.model.learner import Learner, build_learner, learning_rate
from trainer.progress import Progress
from trainer.settings import TrainerSettings
from trainer.statistics import BY_SOURCE
from trainer.update.step import TrainingDiverged, _padding, train
from trainer.update.step_stats import StepStats, by_source, summary

CPU = torch.device("cpu")
SETTINGS = TrainerSettings()
LINE = re.compile(
    r"step (\d)/3 \| loss -?\d+\.\d{4} \| reward 0\.62 \| norm \d+\.\d\d "
    r"\| lr \d\.\de[+-]\d\d \| \d+\.\d\d s \| [\d,]+ tok/s"
)


@pytest.fixture
def learner(base_dir: Path) -> Learner:
    return build_learner(base_dir, CPU, SETTINGS)


def parameters(learner: Learner) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in learner.parameters.values()])


def quiet(_: str) -> None:
    pass


def run(
    learner: Learner, batch: Batch, settings: TrainerSettings, report: Callable[[str], None] = quiet
) -> list[StepStats]:
    return train(learner, batch, settings, max_tokens=24, report=report)


def test_training_makes_rewarded_tokens_likelier_and_others_less_likely(
    learner: Learner, batch: Batch, settings: TrainerSettings
) -> None:
    microbatch = fill(batch, [[Bundle([k], int(batch.input_tokens[k]))] for k in range(len(batch))])
    better = torch.from_numpy(microbatch.advantages > 0)
    before = learner.logprobs(microbatch)[0].detach()
    run(learner, batch, settings)
    gain = learner.logprobs(microbatch)[0].detach() - before
    assert gain[better].mean() > 0 > gain[~better].mean()


@pytest.mark.parametrize("own", [{}, {"code": {"algorithm": "rft", "reward_threshold": None}}])
@pytest.mark.parametrize("max_tokens", [16, 8192])
def test_what_is_measured_of_a_source_is_as_if_it_were_alone(
    learner: Learner,
    group: Callable[..., Group],
    settings: TrainerSettings,
    max_tokens: int,
    own: dict[str, Any],
) -> None:
    rng = np.random.default_rng(0)
    sources = {0: "math", 1: "code", 2: "math"}
    groups = [group(slot, [1.0, 0.0, 0.5, float(slot)], rng) for slot in sources]
    about = {"manifest_sha256": "m", "policy": "p", "temperature": 1.0, "seed": 0}
    chosen = settings.model_copy(
        update={"global_batch_size": 512, "max_tokens_per_microbatch": max_tokens, "learning_rate": 1e-12}
    )
    chosen = TrainerSettings.model_validate({**chosen.model_dump(), "sources": own})
    batch = build_batch(groups, task_sources=sources, settings=chosen, **about)
    found = by_source(stats := run(learner, batch, chosen), batch, chosen)
    for source in ("code", "math"):
        of_source, its_own = chosen.of_source(source), [g for g in groups if sources[g.slot] == source]
        alone = build_batch(its_own, settings=of_source, **about)
        (step,) = run(learner, alone, of_source)
        for name in BY_SOURCE:
            assert found[f"{name}_by_source.{source}"] == pytest.approx(getattr(step, name), abs=1e-5)
        assert by_source([step], alone, chosen) == {}
    assert found["loss_by_source.code"] != pytest.approx(found["loss_by_source.math"], rel=0.01)
    weighed = chosen.model_copy(update={"algorithm": "dpo", "advantage": "pair"})
    assert not any(name.startswith("loss") for name in by_source(stats, batch, weighed))


def test_update_does_not_depend_on_the_microbatches(
    base_dir: Path, batch: Batch, settings: TrainerSettings
) -> None:
    results = []
    for max_tokens in (16, 64, 8192):
        learner = build_learner(base_dir, CPU, SETTINGS)
        resized = settings.model_copy(update={"max_tokens_per_microbatch": max_tokens})
        stats = run(learner, batch, resized)
        results.append((parameters(learner), [step.loss for step in stats], [s.grad_norm for s in stats]))
    for other in results[1:]:
        torch.testing.assert_close(other[0], results[0][0], rtol=0, atol=1e-5)
        assert other[1] == pytest.approx(results[0][1], abs=1e-5)
        assert other[2] == pytest.approx(results[0][2], rel=1e-3)


@pytest.mark.filterwarnings("ignore:::torch")  # of its compiler, which says them when it looks at weights
def test_compiled_layers_train_as_others(
    base_dir: Path, batch: Batch, settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.utils import counters  # slow to import

    # All but making the code: that takes 20 s of torch, and minutes of a compiler of C++ on a busy machine.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    results: list[tuple[torch.Tensor, list[StepStats]]] = []
    for compiled in (False, True):
        counters.clear()
        more = {"compile": compiled, "save_dtype": "bfloat16", "warmup_steps": 0}
        more["max_tokens_per_microbatch"] = 256  # of few shapes: it takes seconds to compile for another one
        chosen = settings.model_copy(update=more)
        learner = build_learner(base_dir, CPU, chosen)
        stats = run(learner, batch, chosen)
        results.append((parameters(learner), stats))
        assert (counters["stats"]["unique_graphs"] > 0) == compiled
    torch._dynamo.reset()  # for the tests behind it
    torch.testing.assert_close(results[1][0], results[0][0], rtol=0, atol=1e-4)
    assert [s.loss for s in results[1][1]] == pytest.approx([s.loss for s in results[0][1]], abs=1e-3)


def test_later_steps_compare_with_the_policy_before_the_first_update(
    learner: Learner, batch: Batch, settings: TrainerSettings
) -> None:
    bold = settings.model_copy(update={"learning_rate": 1e-2, "warmup_steps": 0})
    first, *later = run(learner, batch, bold)
    assert first.clip_fraction == 0
    assert all(step.clip_fraction > 0 for step in later)


def test_second_pass_is_as_if_each_sequence_were_there_twice(
    base_dir: Path, batch: Batch, settings: TrainerSettings
) -> None:
    """Both passes compare with the policy before the first one, and the schedule goes over both."""
    bold = {"learning_rate": 1e-2, "warmup_steps": 0, "schedule": "linear"}
    names = ("token_ids", "loss_mask", "logprobs", "ages", "advantages", "rewards", "slots", "temperatures")
    doubled = {name: np.concatenate([getattr(batch, name)] * 2) for name in names}
    offsets = np.concatenate([batch.offsets, batch.offsets[-1] + batch.offsets[1:]])
    twice = replace(batch, **doubled, offsets=offsets)
    results: list[tuple[torch.Tensor, list[StepStats]]] = []
    for trained, passes, size in ((batch, 2, len(batch)), (twice, 1, len(batch))):
        learner = build_learner(base_dir, CPU, SETTINGS)
        more = {"passes": passes, "global_batch_size": size}
        done = train(
            learner, trained, settings.model_copy(update={**bold, **more}), max_tokens=24, span=(0.0, 1.0),
            report=quiet,
        )  # fmt: skip
        results.append((parameters(learner), done))
    (ours, steps), (theirs, expected) = results
    assert torch.equal(ours, theirs)
    figures = [[(s.loss, s.lr, s.clip_fraction) for s in of_run] for of_run in (steps, expected)]
    assert figures[0] == figures[1] and len(steps) == 2 and steps[1].clip_fraction > 0


def test_progress_counts_each_pass(learner: Learner, batch: Batch, settings: TrainerSettings) -> None:
    reached: list[tuple[int, int]] = []
    progress = Progress(lambda done, total: reached.append((done, total)))
    twice = settings.model_copy(update={"passes": 2})
    assert len(train(learner, batch, twice, max_tokens=24, report=quiet, progress=progress)) == 6
    assert reached[-1][0] == reached[-1][1] == len(reached) - 1


def test_window_over_two_temperatures_is_trained_as_each_is_with_its_own(
    base_dir: Path, settings: TrainerSettings, group: Callable[..., Group]
) -> None:
    """One step: the gradient of the whole is the mean of the gradients of its parts, by their tokens."""
    one_step = settings.model_copy(update={"global_batch_size": 1000, "replay_power": 0.0, "clip_norm": 1e9})
    rng = np.random.default_rng(3)
    own, older = ([group(slot, [0.0, 1.0], rng) for slot in range(6)] for _ in "12")
    about = {"manifest_sha256": "m", "policy": "p", "seed": 0, "settings": one_step}
    both = build_batch(own, temperature=0.6, older=[ReplayedGroups(older, temperature=1.7)], **about)
    assert 0 < (both.temperatures == np.float32(0.6)).sum() < len(both)
    gradients, tokens = [], []
    for batch in (both, *(of_temperature(both, t) for t in (0.6, 1.7))):
        learner = build_learner(base_dir, CPU, SETTINGS)
        (stats,) = run(learner, batch, one_step)
        gradients.append(learner.gradients.clone())
        tokens.append(stats.trained_tokens)
    assert tokens[0] == tokens[1] + tokens[2]
    mean = (gradients[1] * tokens[1] + gradients[2] * tokens[2]) / tokens[0]
    torch.testing.assert_close(gradients[0], mean, rtol=1e-4, atol=1e-7)
    wrong = build_learner(base_dir, CPU, SETTINGS)
    run(wrong, replace(both, temperatures=np.full(len(both), 0.6, np.float32)), one_step)
    assert (wrong.gradients - mean).norm() > 0.05 * mean.norm()


def of_temperature(batch: Batch, temperature: float) -> Batch:
    """The sequences of a batch that were sampled at `temperature`."""
    kept = batch.temperatures == np.float32(temperature)
    of = np.repeat(kept, batch.lengths())
    return replace(
        batch,
        **{name: getattr(batch, name)[of] for name in ("token_ids", "loss_mask", "logprobs", "ages")},
        **{name: getattr(batch, name)[kept] for name in ("advantages", "rewards", "slots", "temperatures")},
        offsets=np.concatenate([[0], np.cumsum(batch.lengths()[kept])]),
    )


def test_each_step_prints_its_line(learner: Learner, batch: Batch, settings: TrainerSettings) -> None:
    lines: list[str] = []
    run(learner, batch, settings, lines.append)
    assert [LINE.fullmatch(line)[1] for line in lines] == ["1", "2", "3"]  # type: ignore[index]


def test_empty_batch_takes_no_step_and_says_so(learner: Learner, settings: TrainerSettings) -> None:
    batch = build_batch([], manifest_sha256="m", policy="p", temperature=1.0, seed=0)
    before = parameters(learner)
    lines: list[str] = []
    assert run(learner, batch, settings, lines.append) == []
    assert lines == ["no step: no group of this iteration has an advantage; the weights stay"]
    assert torch.equal(parameters(learner), before)
    assert learner.optimizer_step == 0
    nothing = {"lr": 1e-6, "tokens": 0.0, "sequences": 0.0, "tokens_per_s": 0.0, "seconds": 0.5}
    assert summary([], 0, 1e-6, 0.5) == nothing, "an entropy of 0 would be a policy that has collapsed"


def test_gradient_is_clipped_and_its_norm_reported_before_clipping(
    base_dir: Path, batch: Batch, settings: TrainerSettings
) -> None:
    norms = []
    for clip_norm in (1e-3, 1e3):
        learner = build_learner(base_dir, CPU, SETTINGS)
        one_step = settings.model_copy(update={"clip_norm": clip_norm, "global_batch_size": 64})
        (step,) = run(learner, batch, one_step)
        norms.append((step.grad_norm, learner.gradients.norm().item()))
    assert norms[0][0] == pytest.approx(norms[1][0])
    assert norms[0][1] == pytest.approx(1e-3, rel=1e-3)
    assert norms[1][1] == pytest.approx(norms[1][0])


def test_broken_advantages_stop_the_training_before_the_weights_change(
    learner: Learner, batch: Batch, settings: TrainerSettings
) -> None:
    broken = Batch.decode(batch.encode())
    advantages = broken.advantages.copy()
    advantages[:] = float("nan")
    object.__setattr__(broken, "advantages", advantages)
    before = parameters(learner)
    with pytest.raises(TrainingDiverged, match="optimizer step 1: loss nan"):
        run(learner, broken, settings)
    assert torch.equal(parameters(learner), before)


def test_missing_logprobs_are_named_before_anything_is_computed(
    learner: Learner, batch: Batch, settings: TrainerSettings
) -> None:
    broken = replace(batch, logprobs=np.full_like(batch.logprobs, np.nan))
    with pytest.raises(ValueError, match="48 of 48 sequences are demonstrations"):
        run(learner, broken, settings)


def with_flat_groups(make: Callable[..., Group], settings: TrainerSettings) -> Batch:
    """20 groups of 4, of which 12 are flat."""
    rng = np.random.default_rng(3)
    rewards = [[1.0] * 4 if slot % 5 < 3 else [0.0, 1.0, 1.0, 0.5] for slot in range(20)]
    groups = [make(slot, of_group, rng) for slot, of_group in enumerate(rewards)]
    about: dict[str, Any] = {"manifest_sha256": "m", "policy": "p", "temperature": 1.0, "seed": 7}
    return build_batch(groups, settings=settings, **about)


@pytest.mark.parametrize("algorithm", ["dr_grpo", "gspo", "rloo"])
def test_flat_groups_count_in_the_divisor_though_they_are_not_computed(
    algorithm: str, base_dir: Path, group: Callable[..., Group]
) -> None:
    """Without them the gradient would be 80 / 32 = 2.5 times as large."""
    norms = {}
    for keep in (True, False):
        one_step = TrainerSettings(algorithm=algorithm, keep_flat_groups=keep)
        batch = with_flat_groups(group, one_step)
        assert len(batch) == 32
        (step,) = run(build_learner(base_dir, CPU, one_step), batch, one_step)
        norms[keep] = step.grad_norm
    assert norms[True] / norms[False] == pytest.approx(32 / 80, rel=1e-4)


@pytest.mark.parametrize("changed", [{"aggregation": "token"}, {"aggregation": "sequence"}, {"clip": "none"}])
def test_steps_are_those_that_computing_the_flat_groups_would_take(
    changed: dict[str, str], base_dir: Path, group: Callable[..., Group], settings: TrainerSettings
) -> None:
    settings = settings.model_copy(update={"aggregation": "constant", "keep_flat_groups": True, **changed})
    results = []
    for kl in ("off", "k3"):  # with a KL term of coefficient 0 they are computed
        mine = settings.model_copy(update={"kl": kl, "kl_coefficient": 0.0})
        learner = build_learner(base_dir, CPU, mine)
        learner.load_reference(base_dir, mine)
        batch = with_flat_groups(group, mine)
        results.append(([step.loss for step in run(learner, batch, mine)], len(batch), parameters(learner)))
    (losses, computed, counted), (all_losses, everything, expected) = results
    assert (computed, everything, len(losses)) == (32, 80, 5)
    assert losses == pytest.approx(all_losses, abs=1e-6)
    torch.testing.assert_close(counted, expected, rtol=0, atol=1e-5)


def test_step_without_an_advantage_is_not_taken(
    learner: Learner, group: Callable[..., Group], settings: TrainerSettings
) -> None:
    kept = settings.model_copy(update={"keep_flat_groups": True, "global_batch_size": 4})
    batch = with_flat_groups(group, kept)
    places = set(range(80)) - set(batch.absent_at.tolist())
    stats = run(learner, batch, kept)
    assert learner.optimizer_step == len(stats) == len({place // 4 for place in places}) < 20
    whitened = settings.model_copy(update={"algorithm": "reinforce++", "advantage": "whitened"})
    flat = build_batch(
        [group(0, [1.0, 1.0], np.random.default_rng(0))],
        settings=whitened.model_copy(update={"keep_flat_groups": True}),
        **{"manifest_sha256": "m", "policy": "p", "temperature": 1.0, "seed": 0},
    )
    assert len(flat) == 2 and run(learner, flat, whitened) == []


def test_entropy_bonus_teaches_flat_groups_too_and_raises_the_entropy(
    learner: Learner, group: Callable[..., Group], settings: TrainerSettings
) -> None:
    bonus = settings.model_copy(update={"entropy_bonus": 1.0, "keep_flat_groups": True, "warmup_steps": 0})
    about = {"manifest_sha256": "m", "policy": "p", "temperature": 1.0, "seed": 0}
    flat = build_batch([group(0, [1.0] * 4, np.random.default_rng(0))], settings=bonus, **about)
    steps = [step for _ in range(5) for step in run(learner, flat, bonus)]
    assert len(flat) == 4 and len(steps) == 5
    assert steps[-1].entropy > steps[0].entropy + 1e-4
    assert steps[0].loss == pytest.approx(-steps[0].entropy, rel=1e-5)
    assert not learner.sums.requires_grad


@pytest.mark.parametrize(("steps", "expected"), [(0, 0.25), (1, 0.5), (3, 1.0), (1000, 1.0)])
def test_learning_rate_rises_linearly_and_stays(steps: int, expected: float) -> None:
    assert learning_rate(steps, TrainerSettings(learning_rate=1.0, warmup_steps=4)) == expected


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("constant", [1, 1, 1, 1]), ("linear", [1, 0.75, 0.5, 0]), ("cosine", [1, 0.853553, 0.5, 0])],
)
def test_schedule_falls_from_the_peak_to_0_over_the_run(schedule: str, expected: list[float]) -> None:
    settings = TrainerSettings.model_validate({"schedule": schedule, "learning_rate": 1.0, "warmup_steps": 4})
    rates = [learning_rate(1000, settings, done) for done in (0, 0.25, 0.5, 1)]
    assert rates == pytest.approx(expected, abs=1e-6)
    assert learning_rate(0, settings, 0.25) == pytest.approx(expected[1] / 4)


def test_schedule_moves_from_step_to_step_and_on_through_the_iterations(
    learner: Learner, batch: Batch, settings: TrainerSettings, make_request: Callable[..., TrainRequest]
) -> None:
    linear = settings.model_copy(update={"schedule": "linear", "warmup_steps": 0, "learning_rate": 1.0})
    rates: list[float] = []
    for iteration in (1, 2):
        request = make_request(batch).model_copy(update={"iteration": iteration, "iterations": 2})
        small = linear.model_copy(update={"clip_norm": 1e-9})
        rates += [
            s.lr for s in train(learner, batch, small, max_tokens=24, span=request.span(), report=quiet)
        ]
    assert rates == pytest.approx([6 / 6, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])
    beyond = make_request(batch).model_copy(update={"iteration": 9, "iterations": 2})
    assert beyond.span() == (1, 1)
    assert beyond.model_copy(update={"iterations": None}).span() == (0, 0)


def test_warm_up_goes_on_over_phases(learner: Learner, batch: Batch, settings: TrainerSettings) -> None:
    slow = settings.model_copy(update={"warmup_steps": 6, "learning_rate": 6e-4})
    rates = [s.lr for _ in range(3) for s in run(learner, batch, slow)]
    assert rates == pytest.approx([1e-4, 2e-4, 3e-4, 4e-4, 5e-4, 6e-4, 6e-4, 6e-4, 6e-4])


def test_norms_do_not_decay_and_matrices_do(
    learner: Learner, batch: Batch, settings: TrainerSettings
) -> None:
    def values() -> Iterator[tuple[str, float]]:
        for name, parameter in learner.parameters.items():
            yield name, parameter.detach().abs().sum().item()

    before = dict(values())
    learner.summed.zero_()
    learner.apply(settings.model_copy(update={"weight_decay": 100.0}))
    for name, value in values():
        assert (value < before[name]) == ("norm" not in name), name


def test_settings_may_change_between_phases(
    learner: Learner, batch: Batch, settings: TrainerSettings
) -> None:
    run(learner, batch, settings)
    changed = settings.model_copy(update={"learning_rate": 5e-4, "betas": (0.8, 0.9), "eps": 1e-5})
    assert run(learner, batch, changed)[-1].lr == 5e-4
    assert {group["eps"] for group in learner.optimizer.param_groups} == {1e-5}
    assert {group["betas"] for group in learner.optimizer.param_groups} == {(0.8, 0.9)}


def test_samples_of_another_policy_are_worth_fewer_of_its_own(
    learner: Learner, batch: Batch, settings: TrainerSettings
) -> None:
    steps = run(learner, batch, settings)
    own = summary(steps[:1], len(batch), 0.0, 1.0)["effective_samples"]
    noise = np.random.default_rng(0).normal(0.0, 1.0, len(batch.logprobs)).astype(np.float32)
    other = replace(batch, logprobs=batch.logprobs + noise * batch.loss_mask)
    far = summary(run(learner, other, settings)[:1], len(batch), 0.0, 1.0)["effective_samples"]
    assert 0.0 < far < 0.7 * own <= 0.7


def test_largest_mismatch_with_the_engine_is_that_of_one_token(
    learner: Learner, batch: Batch, settings: TrainerSettings
) -> None:
    one_off = batch.logprobs.copy()
    token = np.flatnonzero(batch.loss_mask)[100]
    one_off[token] = -40.0
    stats = run(learner, replace(batch, logprobs=one_off), settings)
    assert summary(stats, len(batch), 0.0, 1.0)["mismatch_max"] == max(s.mismatch_max for s in stats) > 30
    assert summary(run(learner, batch, settings), 48, 0.0, 1.0)["mismatch_max"] < 10


def test_padding_of_a_rank_that_has_no_rows_is_none(batch: Batch) -> None:
    plan = [fill(batch, [[Bundle([k], int(batch.input_tokens[k]))] for k in range(8)])]
    rows = batch.input_tokens[:8]
    assert _padding(plan) == pytest.approx(1 - rows.mean() / rows.max())
    assert _padding([fill(batch, [])]) == _padding([]) == 0


def test_summary_weighs_steps_by_their_trained_tokens(
    learner: Learner, batch: Batch, settings: TrainerSettings
) -> None:
    stats = run(learner, batch, settings)
    metrics = summary(stats, len(batch), 0.0, 2.0)
    trained = [step.trained_tokens for step in stats]
    assert sum(trained) == batch.loss_mask.sum()
    weighted = sum(s.entropy * n for s, n in zip(stats, trained, strict=True)) / sum(trained)
    assert metrics["entropy"] == pytest.approx(weighted)
    assert metrics["tokens"] == len(batch.token_ids)
    assert metrics["tokens_per_s"] == len(batch.token_ids) / 2
    assert metrics["sequences"] == 48
    assert all(isinstance(value, float) for value in metrics.values())
