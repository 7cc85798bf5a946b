"""run plan: what it reads from a run of known speeds, and what it proposes."""

import itertools
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.cli import main
from coordinator.console.plan import command
from coordinator.console.plan.measure import Findings, measure
from coordinator.console.plan.propose import (
    Device,
    IterationLoad,
    Option,
    RunFigures,
    propose,
    rank_weights,
    seconds_each,
)
from coordinator.settings.number_ranges import ranges
from coordinator.settings.placement import crews_of, parse_place
from coordinator.settings.tree import SettingsError
from tests.coordinator.console.plan.planned_run import (
    END_S,
    LOAD_S,
    SLEEP_S,
    START_S,
    TOKENS,
    write_model,
    write_run,
)

SECONDS = st.floats(0.01, 1000.0)


def anything(_rollout: Sequence[int], _train: Sequence[int]) -> str:
    return ""


def constant(count: int, rollout_s: float, train_s: float, swap_s: float, **more: float) -> RunFigures:
    """A run on `count` equal devices of one machine, whose rollout and training take so long on all."""
    seconds = dict.fromkeys(["rollout_fixed_s", "train_fixed_s", "load_s", "other_s"], 0.0) | more
    iterations = (IterationLoad(100.0 * count * rollout_s, count * train_s),) * 4
    return RunFigures((Device(0, 100.0),) * count, iterations, sleep_s=swap_s, **seconds)


measurements = st.builds(
    RunFigures,
    devices=st.lists(st.tuples(st.integers(0, 3), st.floats(1.0, 1e4)), min_size=1, max_size=9).map(
        lambda made: tuple(Device(*one) for one in sorted(made))
    ),
    iterations=st.lists(st.builds(IterationLoad, SECONDS, SECONDS), min_size=3, max_size=5).map(tuple),
    rollout_fixed_s=SECONDS,
    train_fixed_s=SECONDS,
    sleep_s=SECONDS,
    load_s=SECONDS,
    other_s=SECONDS,
)


@given(measurements, st.integers(0, 9))
def test_proposal_is_the_fastest_option_that_is_not_refused_and_leaves_no_crew_empty(
    measured: RunFigures, most: int
) -> None:
    def refuse(_rollout: Sequence[int], train: Sequence[int]) -> str:
        return "too small" if len(train) < most else ""

    best, *others = propose(measured, refuse)
    every = set(range(len(measured.devices)))
    assert not best.refused
    for option in (best, *others):
        assert option.rollout and option.train and {*option.rollout, *option.train} == every
        assert option.is_collocated or not {*option.rollout} & {*option.train}
        assert option.refused or best.seconds <= option.seconds * (1 + 1e-5)
        if not option.is_collocated:
            slower = max(option.rollout_s + measured.load_s, option.train_s) + measured.other_s
            assert option.seconds >= slower * (1 - 1e-9)
    if len(every) == 1:
        assert best.is_collocated and not others
    weights = rank_weights(measured, best)
    assert len(weights) == len({device.machine for device in measured.devices}) and min(weights) == 1.0


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=6))
def test_two_crews_cost_no_less_than_the_slower_one_and_no_more_than_turns(
    pairs: list[tuple[float, float]],
) -> None:
    rollouts, trainings = ([pair[side] for pair in pairs] for side in (0, 1))
    by_level = [seconds_each(rollouts, trainings, level) for level in range(6)]
    turns = sum(rollouts + trainings) / len(pairs)
    assert by_level[0] == pytest.approx(turns)
    for sooner, later in itertools.pairwise(by_level):
        assert later <= sooner * (1 + 1e-9)
    assert by_level[-1] >= max(sum(rollouts), sum(trainings)) / len(pairs) * (1 - 1e-9)


def test_equal_iterations_cost_the_longer_half() -> None:
    for rollout_s, train_s in ((3.0, 5.0), (5.0, 3.0), (4.0, 4.0)):
        for level in (1, 2, 3):
            assert seconds_each([rollout_s] * 3, [train_s] * 3, level) == pytest.approx(
                max(rollout_s, train_s)
            )


def test_known_run_gets_the_known_split() -> None:
    # On all 8 devices 30 s and 10 s: 6 generate in 40 s while 2 train in 40 s, in place of 44 s.
    best, *others = propose(constant(8, 30.0, 10.0, swap_s=4.0), anything)
    assert (best.rollout, best.train, best.level) == (tuple(range(6)), (6, 7), 1)
    assert best.seconds == pytest.approx(40.0)
    assert next(o for o in others if o.is_collocated).seconds == pytest.approx(44.0)


@pytest.mark.parametrize(
    "measured",
    [
        constant(8, 30.0, 10.0, swap_s=0.0),  # nothing to save: 40 s either way
        constant(8, 30.0, 10.0, swap_s=0.0, load_s=6.0, other_s=1.3),  # these cost both
        constant(2, 30.0, 3.0, swap_s=4.0),  # one of two devices would generate for 60 s
        constant(1, 30.0, 10.0, swap_s=100.0),
    ],
)
def test_one_crew_stays_where_two_are_not_faster(measured: RunFigures) -> None:
    assert propose(measured, anything)[0].is_collocated


def test_iterations_of_unequal_length_ask_for_a_higher_level() -> None:
    regular = constant(2, 10.0, 10.0, swap_s=50.0)
    work = [IterationLoad(200.0 * 10.0 * factor, 2 * 10.0 * (2 - factor)) for factor in (0.1, 0.1, 1.9, 1.9)]
    uneven = RunFigures(**{**vars(regular), "iterations": tuple(work)})
    assert propose(regular, anything)[0].level == 1
    assert propose(uneven, anything)[0].level > 1


def test_fast_machine_may_generate_or_train_wherever_it_stands() -> None:
    devices = (Device(0, 300.0), Device(1, 100.0), Device(2, 100.0))
    measured = RunFigures(devices, (IterationLoad(3000.0, 1.0),) * 3, 0.0, 0.0, 50.0, 0.0, 0.0)
    halves = {(option.rollout, option.train) for option in propose(measured, anything)}
    assert {((0,), (1, 2)), ((1, 2), (0,))} <= halves
    assert propose(measured, anything)[0].rollout == (0, 1)


def test_weights_hold_in_both_crews() -> None:
    rates = ((0, 100.0), (0, 100.0), (1, 100.0), (1, 100.0), (1, 100.0), (2, 50.0), (2, 50.0))
    devices = tuple(Device(machine, rate) for machine, rate in rates)
    measured = RunFigures(devices, (IterationLoad(1.0, 1.0),) * 3, 0.0, 0.0, 0.0, 0.0, 0.0)

    def weights(rollout: tuple[int, ...], train: tuple[int, ...]) -> tuple[float, ...]:
        return rank_weights(measured, Option(rollout, train, 1, 0.0, 0.0, 0.0, 0.0))

    every = tuple(range(7))
    assert weights(every, every) == (2.0, 3.0, 1.0)
    assert weights((0, 1), (2, 3, 4, 5, 6)) == (1.0, 3.0, 1.0)
    # Machine 1 generates half as much as machine 0, with one device, and trains twice as much as machine 2.
    assert weights((0, 1, 2), (3, 4, 5, 6)) == (4.0, 2.0, 1.0)


def test_devices_are_typed_as_ranges() -> None:
    assert [",".join(ranges(numbers)) for numbers in ((0, 1, 2), (4,), (0, 2, 3))] == ["0-2", "4", "0,2-3"]


def found(root: Path) -> tuple[Findings, float, float]:
    """What is read of a run, with the seconds of rollout and training on all devices."""
    findings = measure(root)
    every = range(len(findings.measured.devices))
    (rollout_s,) = {round(value, 6) for value in findings.measured.rollouts_s(every)}
    (train_s,) = {round(value, 6) for value in findings.measured.trainings_s(every)}
    return findings, rollout_s, train_s


def test_run_of_known_speeds_is_measured_as_it_is(tmp_path: Path) -> None:
    findings, rollout_s, train_s = found(write_run(tmp_path / "run", [8, 4], [100.0, 50.0], train_s=6.0))
    assert findings.machine_rates == {0: pytest.approx(800.0), 1: pytest.approx(200.0)}
    assert [device.machine for device in findings.measured.devices] == [0] * 8 + [1] * 4
    assert rollout_s == pytest.approx(TOKENS / 1000.0)
    # Equal weights: the smaller machine, of a fourth of the speed, takes 6 s for its half of the tokens.
    assert train_s == pytest.approx(6.0 * 2 / 5 + 2.0)
    measured = findings.measured
    assert (measured.sleep_s, measured.load_s, measured.other_s) == (SLEEP_S, LOAD_S, START_S + END_S)
    assert findings.numbers == (2, 3, 4, 5, 6)  # the first one waited for engines and trainers
    assert findings.gpu_bytes == 80e9 and not findings.in_crews


def test_two_crews_are_measured_as_one_is(tmp_path: Path) -> None:
    place = ("rollout=0,1,2", "train=3")
    findings, rollout_s, train_s = found(
        write_run(tmp_path / "run", [2, 2], [100.0, 100.0], train_s=6.0, place=place)
    )
    assert findings.in_crews and findings.machine_rates == {0: pytest.approx(200.0), 1: pytest.approx(100.0)}
    assert rollout_s == pytest.approx(TOKENS / 400.0)
    assert train_s == pytest.approx(6.0 / 4 + 2.0)
    assert (findings.measured.load_s, findings.measured.sleep_s) == (LOAD_S, 0.0)


def test_evaluations_count_as_a_part_of_the_rollout(tmp_path: Path) -> None:
    root = write_run(tmp_path / "run", [4], [100.0], train_s=6.0)
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["phase_seconds"]["eval_rollout"] = 10.0
    (root / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    _, rollout_s, _ = found(root)
    assert rollout_s == pytest.approx(TOKENS / 400.0 + 10.0)


def test_too_few_iterations_are_one_line(tmp_path: Path, run: Any) -> None:
    root = write_run(tmp_path / "run", [4], [100.0], train_s=6.0, iterations=3)
    with pytest.raises(SettingsError, match=r"run plan needs 3 iterations .* there are 2 \("):
        measure(root)
    code, _, err = run(root)
    assert code == 2 and len(err.splitlines()) == 1
    assert run(tmp_path)[0] == 2
    (events := next((root / "events").iterdir())).unlink()
    events.mkdir()
    assert f"{events.name} in events/ cannot be read" in run(root)[2]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """`run plan` at a root: exit code, output, errors."""

    def planned(root: Path, *words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["run", "plan", "--log-path", str(root), *words])
        code = main()
        said = capsys.readouterr()
        return code, said.out, said.err

    return planned


def test_plan_ends_with_the_command_to_type(tmp_path: Path, run: Any) -> None:
    # 24 s, 8 s on all four devices: 3 generate in 32 s, 1 trains in 34 s with the saving.
    root = write_run(tmp_path / "a run", [2, 2], [250.0, 250.0], train_s=8.0)
    code, out, _ = run(root)
    assert code == 0
    words = shlex.split(out.splitlines()[-1])
    assert words == [
        *("run", "--master", "--log-path", str(root), "--place", "rollout=0-2", "--place", "train=3"),
        *("--max-async-level", "1", "--rank-weights", "2,1"),
    ]
    crews = crews_of(parse_place([words[5], words[7]]), [2, 2])
    assert [len(place.devices) for place in crews["rollout"]] == [2, 1]
    document = json.loads(run(root, "--json")[1])
    assert shlex.split(document["command"]) == words
    assert document["options"][0]["seconds"] == pytest.approx(34.5, abs=0.01)
    assert len(document["options"]) == 4


def test_one_device_stays_collocated_and_there_is_nothing_to_type(tmp_path: Path, run: Any) -> None:
    root = write_run(tmp_path / "run", [1], [1000.0], train_s=20.0)
    out = run(root)[1]
    assert out.splitlines()[-1].startswith("stay with one crew: one device")
    rows = {line[:42].strip(): line[42:].split() for line in out.splitlines() if line[42:]}
    alone, beside = rows["one crew in turns, 1 device"], rows["and run guest on 1 more"]
    assert float(beside[0]) == pytest.approx(float(alone[0]) / 2, rel=0.1) and beside[1:3] == alone[1:3]
    assert "two crews, " in run(root, "--devices", "4")[1]
    assert "give a number of devices" in run(root, "--devices", "0")[2]


def test_nodes_that_share_the_cores_of_a_host_are_told_so(tmp_path: Path, run: Any) -> None:
    root = write_run(tmp_path / "run", [1, 1], [1000.0, 1000.0], train_s=12.0)
    assert "share the cores" not in run(root)[1]
    for beat in (root / "protocol" / "main").glob("*/*.b*"):
        beat.write_text(json.dumps({"host": "laptop", "gpu_count": 0}))
    assert "nodes share the cores of one machine" in run(root)[1].splitlines()[-1], "no command"
    assert run(root, "--devices", "4")[1].splitlines()[-1].startswith("  run --master")


def test_two_crews_that_are_slower_than_one_are_told_how_to_become_one(tmp_path: Path, run: Any) -> None:
    place = ("rollout=0", "train=1")
    root = write_run(tmp_path / "run", [1, 1], [100.0, 100.0], train_s=6.0, place=place)
    out = run(root)[1]
    assert "go back to one crew" in out
    assert "--reset-settings cluster.place --reset-settings cluster.max_async_level" in out.splitlines()[-1]


def test_weights_are_proposed_where_machines_differ_and_are_not_weighted_yet(
    tmp_path: Path, run: Any
) -> None:
    equal = {"cluster.rank_weights": (1.0, 1.0)}
    root = write_run(tmp_path / "run", [1, 1], [200.0, 100.0], train_s=0.1, settings=equal)
    assert run(root)[1].splitlines()[-1].endswith("--rank-weights 2,1")
    weighted = {"cluster.rank_weights": (2.0, 1.0)}
    root = write_run(tmp_path / "other", [1, 1], [200.0, 100.0], train_s=0.1, settings=weighted)
    assert "--rank-weights" not in run(root)[1]


def test_split_that_cannot_be_is_named_and_not_proposed(
    tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = {"engine.tensor_parallel_size": 2}
    root = write_run(tmp_path / "run", [4], [250.0], train_s=8.0, settings=two)
    options = json.loads(run(root, "--json")[1])["options"]
    by_size = {len(option["rollout"]): option["refused"] for option in options}
    assert "engine.tensor_parallel_size=2" in by_size[3] and by_size[2] == by_size[4] == ""
    root = write_run(tmp_path / "other", [4], [250.0], train_s=8.0, settings={"trainer.context_parallel": 2})
    refused = {len(o["train"]): o["refused"] for o in json.loads(run(root, "--json")[1])["options"]}
    assert "trainer.context_parallel=2 does not divide its devices" in refused[3] and refused[2] == ""


def test_split_whose_trainer_does_not_fit_is_refused(tmp_path: Path, run: Any) -> None:
    root = write_run(tmp_path / "run", [4], [250.0], train_s=8.0, gpu_bytes=1e9)
    assert json.loads(run(root, "--json")[1])["options"][0]["rollout"] == [0, 1, 2]  # no model, no memory
    write_model(root / "base_model", parameters=10_000_000)
    refused = {len(o["train"]): o["refused"] for o in json.loads(run(root, "--json")[1])["options"]}
    assert all(f"at least {1.16:.0f} GB a GPU, which has 1" in refused[size] for size in (1, 2, 3))
    assert refused[4] == ""  # it has trained so


def test_correction_that_older_samples_need_is_part_of_the_command(tmp_path: Path) -> None:
    off = {"trainer.engine_correction": "off"}
    findings = measure(write_run(tmp_path / "run", [4], [250.0], train_s=8.0, settings=off))
    best = propose(findings.measured, anything)[0]
    assert not best.is_collocated
    assert "trainer.engine_correction=truncated" in command(findings, findings.measured, best).split()
