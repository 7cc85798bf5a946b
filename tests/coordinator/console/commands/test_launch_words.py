"""What is typed behind `run launch`: refused before any host is asked, or passed on to the nodes."""

import json
from pathlib import Path

import pytest

from coordinator.console.commands import launch as launch_module
from coordinator.console.commands.launch import node_commands
from coordinator.console.commands.launch_ssh import launch_ssh
from coordinator.settings.tree import SettingsError
from tests.coordinator.console.commands.shell_as_ssh import SSH, program


@pytest.fixture
def ssh(tmp_path: Path) -> str:
    return str(program(tmp_path / "ssh", SSH))


@pytest.mark.parametrize(
    ("hosts", "words", "expected"),
    [
        ("a,,b", [], "--hosts a,,b: '' is not a host"),
        ("a,-oProxyCommand=x", [], "'-oProxyCommand=x' is not a host"),
        ("a b", [], "'a b' is not a host"),
        ("a,b", ["--master"], "leave --master out"),
        ("a,b", ["--worker", "1"], "leave --worker out"),
        ("a,b", ["--num-nodes=2"], "leave --num-nodes out"),
        ("a,b", ["cluster.num_nodes=2"], "leave cluster.num_nodes out"),
        ("a,b", ["--rank-weights", "2,1,1"], "--rank-weights 2,1,1 has 3 weights for --num-nodes 2"),
        (
            "a,b",
            ["--config", "/dev/fd/63"],
            "--config /dev/fd/63: is a pipe, which no other",
        ),
        ("a,b", ["--config=/dev/stdin"], "--config /dev/stdin: is a pipe"),
        ("a,b", ["--nodes", "3"], "No such option: --nodes"),
    ],
)
def test_bad_words_are_refused_in_one_line_before_any_host_is_asked(
    ssh: str, tmp_path: Path, hosts: str, words: list[str], expected: str
) -> None:
    program(Path(ssh), f"#!/bin/sh\ntouch {tmp_path}/asked\n")
    with pytest.raises(SettingsError) as refused:
        launch_ssh(hosts, tmp_path / "run", words, ssh)
    assert expected in str(refused.value) and "\n" not in str(refused.value)
    assert not (tmp_path / "asked").exists() and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("ssh", "expected"),
    [("absent -p 1", "'absent -p 1': no such program here"), ("ssh '", "No closing quotation")],
)
def test_client_that_cannot_be_started_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ssh: str, expected: str
) -> None:
    monkeypatch.setattr(launch_module, "_understood", lambda *_: "")
    with pytest.raises(SettingsError, match=f"--ssh .*{expected}"):
        launch_ssh("a,b", tmp_path, [], ssh)


def test_dry_run_prints_settings_and_commands_and_asks_no_host(
    ssh: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program(Path(ssh), f"#!/bin/sh\ntouch {tmp_path}/asked\n")
    assert launch_ssh("a,me@b", tmp_path / "r", ["rollout.seed=3", "--dry-run"], ssh, "/opt/run") == 0
    said = capfd.readouterr()
    settings = json.loads(said.out)
    assert (settings["cluster"]["num_nodes"], settings["rollout"]["seed"]) == (2, 3)
    assert said.err.splitlines() == [
        f"a: /opt/run --master --num-nodes 2 --log-path {tmp_path}/r rollout.seed=3",
        f"me@b: /opt/run --worker 1 --log-path {tmp_path}/r",
    ]
    assert not (tmp_path / "asked").exists()


def test_workers_read_their_settings_from_the_master() -> None:
    assert node_commands("/x/run", 3, Path("/s"), ["--model", "m"]) == [
        ["/x/run", "--master", "--num-nodes", "3", "--log-path", "/s", "--model", "m"],
        ["/x/run", "--worker", "1", "--log-path", "/s"],
        ["/x/run", "--worker", "2", "--log-path", "/s"],
    ]


def test_every_node_is_told_that_the_directory_may_be_shared() -> None:
    words = ["--iterations", "2", "--allow-shared-dir"]
    commands = node_commands("run", 3, Path("/shared/exp1"), words)
    assert ["--allow-shared-dir" in command for command in commands] == [True, True, True]
    assert ["--iterations" in command for command in commands] == [True, False, False]
