"""A group of nodes with an environment and a Python of their own: what its engines and trainers get."""

import os
import sys
from pathlib import Path

from coordinator.settings.node_groups import OWN
from tests.cluster.cluster import FAST, Cluster


def test_children_of_the_group_alone_get_its_environment_and_its_python(
    cluster: Cluster, tmp_path: Path
) -> None:
    calls = tmp_path / "calls"
    calls.mkdir()
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nenv > {calls}/$$.env\necho "$@" > {calls}/$$.words\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    group = ("nodes=1", "env.FLAVOUR=sour", f"python={python}")
    assert cluster.run(
        2, *FAST, "--iterations", "1", *(f"cluster.groups.old.{setting}" for setting in group)
    ) == [0, 0], cluster.everything_said()

    found: dict[str, dict[str, str]] = {}
    for file in calls.glob("*.words"):
        lines = file.with_suffix(".env").read_text().splitlines()
        name = next(
            word for word in file.read_text().split() if word.startswith(("-c", "rollout.", "trainer"))
        )
        pairs = [line.partition("=") for line in lines]
        found[name] = {variable: value for variable, sign, value in pairs if sign}
    # The question whether flagpost is there; one engine, one agent of torchrun, one worker of it.
    assert found.keys() == {"-c", "rollout.engines.embedded.server", "trainer.job.agent", "trainer"}
    assert all(environment["FLAVOUR"] == "sour" for environment in found.values())

    by_torchrun = {
        name
        for name, value in found["trainer"].items()
        if found["trainer.job.agent"].get(name) != value and name not in {"_", "PWD", "SHLVL"}
    }
    assert "RANK" in by_torchrun
    assert {name for name in by_torchrun - OWN if not name.startswith("TORCHELASTIC_")} == set()
    assert "FLAVOUR" not in os.environ
