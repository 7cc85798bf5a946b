import pytest

from trainer.documents import Resume, SavedState, TrainedBatch
from trainer.resume import plan_resume, saves_in_background
from trainer.settings import TrainerSettings


def state(iteration: int, policy: str) -> SavedState:
    return SavedState(format=2, iteration=iteration, policy=policy, optimizer_step=3, files={})


def batches(
    *iterations: int, save_interval: int = 2, known: dict[int, str] | None = None
) -> dict[int, TrainedBatch | None]:
    return {
        k: TrainedBatch(
            iteration=k,
            policy=(known or {}).get(k, f"p{k}"),
            batch_file=f"batch_{k}",
            batch_sha256="0",
            settings=TrainerSettings(save_interval=save_interval),
            max_tokens=8,
        )
        for k in iterations
    }


def plan(
    states: dict[str, SavedState], trained: dict[int, TrainedBatch | None]
) -> tuple[str | None, str | None, list[int]]:
    """For the checkpoint of iteration 7, policy p7."""
    resume = plan_resume(7, "p7", states, trained, trained.get)
    return resume.state_dir, resume.state_policy, [batch.iteration for batch in resume.repeat]


def test_state_of_the_policy_itself_is_continued_and_nothing_repeated() -> None:
    assert plan({"a": state(6, "p6"), "b": state(7, "p7")}, batches(6, 7)) == ("b", "p7", [])


def test_newest_earlier_state_is_continued_and_what_was_trained_since_is_repeated() -> None:
    states = {"a": state(3, "p3"), "b": state(5, "p5"), "c": state(8, "p8")}
    # Iteration 6 was not trained: a run may have collected only.
    assert plan(states, batches(3, 4, 5, 7, 8)) == ("b", "p5", [7])


def test_state_of_another_policy_than_the_published_one_is_not_used() -> None:
    states = {"a": state(3, "p3"), "b": state(5, "other"), "c": state(7, "other")}
    assert plan(states, batches(4, 5, 6, 7)) == ("a", "p3", [4, 5, 6, 7])
    unknown = {5: None, **batches(6, 7)}  # saved with the checkpoint, perhaps
    assert plan(states, unknown) == ("b", "other", [6, 7])


def test_without_every_batch_since_the_optimizer_starts_afresh() -> None:
    for save_interval, states in ((2, {"a": state(5, "p5")}), (9, {})):
        trained = {6: None, **batches(7, save_interval=save_interval)}
        assert plan_resume(7, "p7", states, trained, trained.get) == Resume()


def test_only_batches_since_the_state_are_looked_at() -> None:
    trained, asked = batches(*range(1, 8)), set[int]()

    def batch_of(iteration: int) -> TrainedBatch | None:
        asked.add(iteration)
        return trained[iteration]

    assert (
        plan_resume(7, "p7", {"a": state(2, "p2"), "b": state(5, "p5")}, trained, batch_of).state_dir == "b"
    )
    assert asked == {5, 6, 7}


@pytest.mark.parametrize(
    ("trained", "repeated"),
    [
        (batches(1, 3, 7, save_interval=7), [1, 3, 7]),
        (batches(7, save_interval=2), [7]),
        ({**batches(1, save_interval=9), **batches(6, 7)}, [1, 6, 7]),
        (batches(5, 6, 7, save_interval=2), [5, 6, 7]),  # one was due since: a kill has cut it off
        (batches(*range(1, 8), save_interval=1), []),  # nobody was killed so often: the states were removed
    ],
)
def test_without_a_state_training_is_repeated_from_the_start(
    trained: dict[int, TrainedBatch | None], repeated: list[int]
) -> None:
    resume = plan_resume(7, "p7", {}, trained, trained.get)
    assert [batch.iteration for batch in resume.repeat] == repeated
    assert resume.from_start == bool(repeated) and resume.state_dir is None


def test_state_is_saved_in_the_background_in_every_so_many_iterations() -> None:
    assert [k for k in range(1, 10) if saves_in_background(k, 3)] == [3, 6, 9]
    assert not any(saves_in_background(k, 1) for k in range(10))


def test_state_is_saved_at_once_where_the_one_that_was_due_was_lost() -> None:
    assert [repeated for repeated in range(5) if saves_in_background(4, 3, repeated)] == [3, 4]
    assert not saves_in_background(4, 1, 9), "it is in the checkpoint"
