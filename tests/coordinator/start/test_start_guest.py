"""The start of a guest: what is refused on its machine, before anything is written."""

from pathlib import Path

import pytest

from coordinator.directory.layout import GUESTS, RunDir
from coordinator.settings.loading import build
from coordinator.settings.tree import SettingsError
from coordinator.start import start_guest as module
from coordinator.start.inputs import load_inputs
from coordinator.start.request import StartRequest
from coordinator.start.run_json import fixed_of, make_run
from coordinator.start.start_guest import start_guest
from rollout.origin import Code
from rollout.storage import files
from tests.coordinator.examples import record, tree


def begin(root: Path, monkeypatch: pytest.MonkeyPatch, **differs: Code) -> None:
    """Have a run there whose master lives, with other code than here where it `differs`."""
    settings = build({"tiny.warmup_steps": 0})
    inputs = load_inputs(settings, {})
    run = make_run(RunDir(root), fixed_of(settings, inputs), 0)
    codes = {**inputs.codes(), **{name.replace("__", "."): code for name, code in differs.items()}}
    for directory in RunDir(root).protocol:
        files.make_directory(directory)
    present = record(settings=settings).model_copy(update={"run_id": run["run_id"], "inputs": codes})
    monkeypatch.setattr(module, "await_master", lambda *_: present)


@pytest.mark.parametrize("name", ["rollout.reward", "rollout.environment"])
def test_guest_whose_code_is_not_that_of_the_master_is_refused_and_writes_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(tmp_path, monkeypatch, **{name.replace(".", "__"): Code("mine.py:one", "0" * 16)})
    before = tree(tmp_path)
    with pytest.raises(
        SettingsError, match=rf"{name.split('.')[1]} .* is not the same on .*: give all nodes"
    ):
        start_guest(StartRequest(tmp_path))
    assert tree(tmp_path) == before


def test_guest_of_another_name_has_a_rank_of_its_own_and_one_that_returns_its_own_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(tmp_path, monkeypatch)
    ranks = [start_guest(StartRequest(tmp_path, guest=name)).rank for name in ("a", "b", "a")]
    assert ranks == [GUESTS, GUESTS + 1, GUESTS]
    with pytest.raises(
        SettingsError, match=r"--iterations: a guest takes its settings from the run; leave it"
    ):
        start_guest(StartRequest(tmp_path, overrides={"iterations": 3}))
