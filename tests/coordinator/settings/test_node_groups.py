"""cluster.groups: machines that differ. What a group may say, and which process has to know it."""

import itertools
import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli import main
from coordinator.directory.layout import RunDir
from coordinator.machine.children import Children
from coordinator.protocol.records import GivenSettings
from coordinator.settings import loading
from coordinator.settings.node_groups import OWN
from coordinator.settings.settings_file import read_file
from coordinator.settings.tree import SettingsError
from coordinator.start.inputs import load_inputs, python_of
from coordinator.start.last_settings import with_kept
from rollout.engines.kinds import vllm_installed
from rollout.engines.kinds.choice import engine_kind
from rollout.engines.kinds.embedded import Embedded
from rollout.engines.kinds.vllm import Vllm
from rollout.settings import EngineSettings
from tests.coordinator.examples import record
from trainer.job import launch

FOUR = {"cluster.num_nodes": 4}


def built(*words: str, **more: Any) -> loading.RunSettings:
    """The settings of a run of four nodes."""
    return loading.build({**FOUR, **dict(map(loading.parse_override, words)), **more})


def groups(*words: str) -> dict[str, Any]:
    return built(*words).model_dump(mode="json")["cluster"]["groups"]


def test_group_of_a_file_and_of_the_command_line_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(
        '[cluster.groups.old]\nnodes = "0,2-3"\npython = "/opt/old/bin/python"\n'
        "[cluster.groups.old.env]\nNCCL_IB_DISABLE = 1\n"
    )
    typed = (
        "cluster.groups.old.nodes=0,2-3",
        "cluster.groups.old.env.NCCL_IB_DISABLE=1",
        "cluster.groups.old.python=/opt/old/bin/python",
    )
    said = loading.build({**FOUR, **read_file(file)})
    assert said == built(*typed)
    assert [rank for rank in range(5) if said.cluster.group_of(rank)] == [0, 2, 3]


@pytest.mark.parametrize(
    ("typed", "ranks"), [("2", {2}), ("2,3", {2, 3}), ("0-2", {0, 1, 2}), ("0,2-3", {0, 2, 3})]
)
def test_ranks_are_typed_as_numbers_and_ranges(typed: str, ranks: set[int]) -> None:
    assert built(f"cluster.groups.a.nodes={typed}").cluster.groups["a"].ranks == ranks


@pytest.mark.parametrize("value", ["1", "1.50", "true", "1e3", '"x"', "a=b", ""])
def test_value_of_a_variable_stays_as_it_was_typed(value: str) -> None:
    assert groups("cluster.groups.a.nodes=1", f"cluster.groups.a.env.V={value}")["a"]["env"] == {"V": value}


def test_command_line_adds_to_a_group_of_the_file() -> None:
    file = {"cluster.groups": {"a": {"nodes": "1", "env": {"V": "1", "W": "1"}}, "b": {"nodes": "2"}}}
    settings = loading.build({**FOUR, **file, "cluster.groups.a.env.W": "2"})
    assert settings.cluster.groups["a"].env == {"V": "1", "W": "2"} and "b" in settings.cluster.groups
    assert file["cluster.groups"]["a"]["env"] == {"V": "1", "W": "1"}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["a.nodes=1-4"], "cluster.groups.a.nodes=1-4: there is no rank 4 with --num-nodes 4"),
        (["a.nodes=0-1", "b.nodes=1"], "cluster.groups.b.nodes=1: rank 1 is in the group a too"),
        (["a.nodes=2-1"], "cluster.groups.a.nodes=2-1: '2-1' ends before it begins"),
        (["a.nodes=x"], "cluster.groups.a.nodes=x: 'x' is not a range of ranks"),
        (["a.env.V=1"], "cluster.groups.a.nodes is missing; give the ranks"),
        (["a.nodes=1", "a.evn.V=1"], "unknown setting cluster.groups.a.evn; a group has nodes, env, python"),
        (["a.nodes=1", "a.env.CUDA_VISIBLE_DEVICES=0"], "a node counts its GPUs by it: export it there"),
        (["a.nodes=1", "a.env.MASTER_ADDR=x"], "cluster.groups.a.env.MASTER_ADDR: flagpost sets this itself"),
        (["a.nodes=1", "a.env.TORCHELASTIC_RUN_ID=x"], "flagpost sets this itself"),
        (["a.nodes=1", "a.env.A-B=x"], "cluster.groups.a.env.A-B: this is not a name of a variable"),
        (["a.nodes=1", "a.env.HF_TOKEN=x"], "cluster.groups.a.env.HF_TOKEN is a secret"),
        (["a.nodes=1", "a.python=venv/bin/python"], "give an absolute path"),
        (["a.nodes=1", "a.python=~/venv/bin/python"], "give an absolute path"),
        (["a=3", "a.nodes=1"], "cluster.groups.a.nodes: a is not a table"),
        (["a b.nodes=1"], "name a group with letters"),
    ],
)
def test_bad_group_is_refused_in_one_line_and_nothing_is_written(
    words: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    typed = [f"cluster.groups.{word}" for word in words]
    monkeypatch.setattr(
        "sys.argv", ["run", "--master", "--num-nodes", "4", "--log-path", str(tmp_path / "run"), *typed]
    )
    assert main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert text in line
    assert not (tmp_path / "run").exists()


def test_secret_in_a_file_is_not_repeated() -> None:
    given = {"cluster.groups": {"a": {"nodes": "1", "env": {"WANDB_API_KEY": "hidden"}}}}
    with pytest.raises(SettingsError, match="WANDB_API_KEY is a secret") as raised:
        loading.build({**FOUR, **given})
    assert "hidden" not in str(raised.value)


def test_groups_hold_on_at_the_next_start_until_they_are_reset() -> None:
    words = ("cluster.groups.a.nodes=3", "cluster.groups.a.env.V=1")
    given = {**FOUR, **dict(map(loading.parse_override, words))}
    last = record(settings=loading.build(given))
    last = last.model_copy(update={"given": GivenSettings(host=socket.gethostname(), settings=given)})
    kept = loading.build(with_kept({"cluster.groups.a.env.V": "2"}, last, []))
    assert kept.cluster.groups["a"].env == {"V": "2"} and kept.cluster.groups["a"].ranks == {3}
    assert not loading.build(with_kept({}, last, ["cluster.groups.a"])).cluster.groups
    with pytest.raises(SettingsError, match=r"no rank 3 with --num-nodes 2.*--reset-settings cluster.groups"):
        with_kept({"cluster.num_nodes": 2}, last, [])


def test_worker_may_be_given_the_same_group_and_no_other() -> None:
    published = built("cluster.groups.a.nodes=1", "cluster.groups.a.env.V=1")
    same = {"cluster.groups.a.env.V": "1", "cluster.groups.a.env": {"V": "1"}}
    assert loading.contradictions(published, same) == []
    (line,) = loading.contradictions(published, {"cluster.groups.a.env.V": "2"})
    assert line == "cluster.groups.a.env.V is 2 here, but the master published 1"


def test_crew_with_fewer_nodes_than_the_run_reads_the_groups_of_all() -> None:
    settings = built("cluster.groups.a.nodes=3")
    document = settings.model_dump(mode="json")
    document["cluster"]["num_nodes"] = 1
    cluster = loading.overlay(loading.RunSettings.published(document), {}).cluster
    crew = RunDir(Path("run"), "train", (3,))
    assert cluster.group_of(crew.machine(0)) == settings.cluster.groups["a"]


def test_variables_that_flagpost_sets_are_those_that_are_refused() -> None:
    adapters, gpus = (0, 16), (0, 1)
    kinds = (EngineSettings(kind="torch"), EngineSettings(kind="vllm"))
    found: set[str] = set()
    for settings, count, lora in itertools.product(kinds, gpus, adapters):
        found |= engine_kind(settings, count).command("model", "s", lora).env.keys()
    job = launch.Launch(1, 0, 1, "127.0.0.1", 1, "lo", Path("spool"), 1, 1.0, 1.0)
    found |= launch.environment(job).keys()
    assert found <= OWN  # torchrun's: tests/cluster/test_groups.py


def test_python_that_is_not_there_is_named_with_rank_and_host(tmp_path: Path) -> None:
    settings = built("cluster.groups.a.nodes=2", f"cluster.groups.a.python={tmp_path}/python")
    load_inputs(settings, {}, 1)
    where = f"cluster.groups.a.python={tmp_path}/python on rank 2 ({socket.gethostname()}): "
    with pytest.raises(SettingsError) as raised:
        load_inputs(settings, {}, 2)
    assert str(raised.value).startswith(f"{where}there is no such program")


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("echo 'ModuleNotFoundError: no trainer' >&2; exit 1", "no trainer"),
        ("exit 3", "exit 3"),
        ("echo 0.0.1", "flagpost 0.0.1"),
    ],
)
def test_python_without_this_flagpost_is_refused(tmp_path: Path, text: str, why: str) -> None:
    python = script(tmp_path / "python", text)
    with pytest.raises(SettingsError, match=rf"on rank 1 \(.*\): .*{why}"):
        python_of(built("cluster.groups.a.nodes=1", f"cluster.groups.a.python={python}"), 1)


def test_python_is_found_in_the_path_of_its_group(tmp_path: Path) -> None:
    there = script(tmp_path / "python-of-mine", f'exec {sys.executable} "$@"')
    path = f"cluster.groups.a.env.PATH={tmp_path}:/usr/bin:/bin"
    settings = built("cluster.groups.a.nodes=1", "cluster.groups.a.python=python-of-mine", path)
    assert python_of(settings, 1) == str(there)
    with Children() as children:
        children.group = settings.cluster.group_of(1)
        assert children.python == str(there)
        children.start("engine", [children.python, "-c", "pass"]).wait(30.0)


def test_kind_of_engine_goes_by_what_is_installed_for_the_python_of_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has, lacks = (script(tmp_path / name, f"exit {code}") for name, code in (("has", 0), ("lacks", 1)))
    monkeypatch.setattr(vllm_installed, "is_installed", lambda _module: False)
    assert isinstance(engine_kind(EngineSettings(), 1, str(has)), Vllm)
    assert isinstance(engine_kind(EngineSettings(), 1, str(lacks)), Embedded)
    assert isinstance(engine_kind(EngineSettings(), 1, str(tmp_path / "absent")), Embedded)
    assert Vllm(EngineSettings(), 1, str(has)).command("m", "s").argv[0] == str(has)


def test_group_stands_above_the_environment_and_below_what_a_child_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLAVOUR", "sweet")
    program = "import json, os; print(json.dumps([os.environ['FLAVOUR'], os.environ['NEEDED']]))"
    words = ("cluster.groups.a.nodes=1", "cluster.groups.a.env.FLAVOUR=sour", "cluster.groups.a.env.NEEDED=x")
    with Children() as children:
        children.group = built(*words).cluster.group_of(1)
        child = children.start("child", [sys.executable, "-c", program], env={"NEEDED": "y"})
        assert child.wait(30.0) == 0
        assert json.loads(child.tail()) == ["sour", "y"]
