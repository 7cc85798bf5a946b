"""Where two groups, weights or openings differ first, as `run diff` says it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from coordinator.console.report import write_comparison
from coordinator.console.views import difference
from coordinator.console.views.run import Run
from coordinator.directory.published import Incomplete
from coordinator.protocol.phase import Phase
from coordinator.settings.tree import SettingsError
from rollout.trajectory import Group, Sample
from tests.coordinator.example_run import make_run


def sample(ids: list[int], text: str = "", reward: float = 0.0, logprob: float = -0.5) -> Sample:
    count = len(ids)
    mask, logprobs = np.ones(count, np.uint8), np.full(count, logprob, np.float32)
    return Sample(np.array(ids, np.int32), mask, logprobs, "stop", text, reward)


def group(*samples: Sample, slot: int = 3, task: str = "t", given_up: str | None = None) -> Group:
    return Group(slot, task, "1+1=", list(samples), given_up)


@pytest.mark.parametrize(
    "ours, theirs, text",
    [
        (group(sample([1, 2, 3], "a")), group(sample([1, 2, 9], "b")), "sample 0, token 2: 3 against 9 "),
        (group(sample([1, 2])), group(sample([1, 2, 9])), "sample 0, token 2: the end against 9 "),
        (
            group(sample([1])),
            group(sample([1], logprob=-0.25)),
            "sample 0, token 0: logprob -0.5 against -0.25",
        ),
        (
            group(sample([1])),
            group(sample([1], reward=1.0)),
            "sample 0, reward 0.0 against 1.0, for the same",
        ),
        (group(sample([1]), sample([2])), group(sample([1])), "2 samples against 1"),
        (group(sample([1])), group(given_up="it hangs"), "given up: no against it hangs"),
        (group(sample([1])), group(sample([1]), task="u"), "B has task u there"),
        (group(sample([1]), slot=2), group(sample([1])), "only A has made it"),
    ],
)
def test_first_difference_of_two_groups_is_named(ours: Group, theirs: Group, text: str) -> None:
    (first, *_) = difference._groups(4, "train", [ours], [theirs])
    assert (first.iteration, first.phase) == (4, Phase.TRAIN_ROLLOUT)
    assert text in first.text and f"slot {ours.slot}" in first.text


def test_logprobs_that_are_no_number_in_both_are_equal() -> None:
    same = [group(sample([1, 2], logprob=float("nan"))) for _ in range(2)]
    assert not list(difference._groups(1, "train", [same[0]], [same[1]]))


def test_first_tensor_that_differs_is_named(tmp_path: Path) -> None:
    tensors = {"a": np.zeros(3, np.float32), "b": np.ones((2, 2), np.float32), "c": np.ones(1, np.float32)}
    save_file(tensors, tmp_path / "one.safetensors")
    save_file({**tensors, "b": -tensors["b"], "c": -tensors["c"]}, tmp_path / "two.safetensors")
    text = difference._of_file("m.safetensors", tmp_path / "one.safetensors", tmp_path / "two.safetensors")
    assert text == "2 of 3 tensors of m.safetensors differ, the first is b"


def test_other_tasks_are_named_by_their_place() -> None:
    first: dict[str, Any] = {"policy": "p", "policy_iteration": 1, "tasks": [1, 2, 3]}
    second = json.loads(json.dumps(first)) | {"tasks": [1, 5, 3]}
    (parting,) = difference._opening(2, first, second)
    assert parting.text == "tasks: 2 against 5 in place 1"
    assert not list(difference._opening(2, first, first))


@pytest.fixture
def two_runs(tmp_path: Path) -> tuple[Path, Path]:
    roots = tmp_path / "one", tmp_path / "two"
    for root in roots:
        make_run(root, nodes=1, iterations=2)
    return roots


def test_runs_without_a_finished_iteration_in_common_are_not_called_equal(
    two_runs: tuple[Path, Path],
) -> None:
    (two_runs[1] / "metrics.jsonl").write_text("")
    with pytest.raises(SettingsError, match="have no finished iteration in common; wait until"):
        difference.describe_difference(*two_runs)


def test_what_is_equal_is_said_in_words_and_curves_have_the_names_of_the_runs(
    two_runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "trajectories", lambda *_: [])
    compared = difference.ComparedIterations([1, 2], [1, 2], [], None)
    equal = "equal iterations: 1 to 2, by metrics, samples of 1 to 2 and no weights"
    assert difference._equal_text(compared) == equal
    metrics = two_runs[1] / "metrics.jsonl"
    lines = [json.loads(line) | {"reward": 0.125} for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    texts, is_equal = difference.describe_difference(*two_runs)
    assert not is_equal and texts[3] == "no iteration is equal"
    page = write_comparison(*two_runs, texts, tmp_path / "page.html").read_text()
    assert "A: one<" in page and "B: two<" in page


def test_what_is_damaged_is_named(two_runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(_run: Run, _iteration: int, _kind: str) -> Any:
        raise Incomplete("part0001 differs from the manifest's checksum")

    monkeypatch.setattr(Run, "trajectories", damaged)
    with pytest.raises(SettingsError, match=r"part0001 differs .*; what is damaged cannot be compared"):
        difference.describe_difference(*two_runs)


def test_argument_that_is_no_run_is_named_without_an_option_that_the_command_lacks(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=f"^{tmp_path}: no run there"):
        difference.describe_difference(tmp_path, tmp_path)
