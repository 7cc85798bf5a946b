"""scripts/k8s.yaml: what Kubernetes' own schema says of it, and what `run` makes of its command."""

import copy
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from coordinator.cli import main
from coordinator.protocol.exits import Exit

FILE = Path(__file__).parents[2] / "scripts" / "k8s.yaml"
CLAIM, JOB = yaml.safe_load_all(FILE.read_text())
POD = JOB["spec"]["template"]["spec"]
NODE = POD["containers"][0]
VERSIONS = ["1.33", kubernetes_validate.latest_version()]
"""The oldest that the file says it needs, and the newest."""


def validate(resource: dict[str, Any], version: str) -> None:
    """ValidationError for a field that is unknown, missing, or of another type."""
    kubernetes_validate.validate(resource, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_claim_and_the_job_are_valid(version: str) -> None:
    for resource in (CLAIM, JOB):
        validate(resource, version)


@pytest.mark.parametrize(
    "path",
    [
        ("spec", "completionMode"),
        ("spec", "podFailurePolicy", "rules", 1, "onExitCodes", "values"),
        ("spec", "template", "spec", "containers", 0, "volumeMounts", 0, "mountPath"),
    ],
    ids=str,
)
def test_a_misspelt_field_is_refused(path: tuple[Any, ...]) -> None:
    job = copy.deepcopy(JOB)
    parent = job
    for key in path[:-1]:
        parent = parent[key]
    parent[f"{path[-1]}s"] = parent.pop(path[-1])
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(job, VERSIONS[-1])


def test_every_node_of_the_run_has_a_pod_and_runs_to_the_end_of_its_rank() -> None:
    spec = JOB["spec"]
    nodes = int(NODE["command"][NODE["command"].index("--num-nodes") + 1])
    assert spec["completions"] == spec["parallelism"] == nodes > 1
    assert spec["completionMode"] == "Indexed"


def test_what_the_schema_does_not_say_of_retries_holds() -> None:
    """A failure policy, and limits per index, need pods that are not restarted in place."""
    assert POD["restartPolicy"] == "Never" and JOB["spec"]["podReplacementPolicy"] == "Failed"
    ignored, fatal = JOB["spec"]["podFailurePolicy"]["rules"]
    assert ignored["action"] == "Ignore" and fatal["action"] == "FailJob"
    assert fatal["onExitCodes"]["containerName"] == NODE["name"]
    # A node that was lost or asked to end comes back; these do not.
    assert set(fatal["onExitCodes"]["values"]) == {Exit.FAILED, Exit.USAGE, Exit.SUPERSEDED}


def test_all_pods_write_the_volume_that_the_claim_names() -> None:
    assert CLAIM["spec"]["accessModes"] == ["ReadWriteMany"]
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in NODE["volumeMounts"]}
    assert mounts.keys() == volumes.keys()
    assert volumes["shared"]["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]
    root = NODE["command"][NODE["command"].index("--log-path") + 1]
    assert Path(root).is_relative_to(mounts["shared"])


def test_the_command_takes_a_placement_and_groups_of_machines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As behind the other options: every pod has the same command."""
    settings = tmp_path / "settings.toml"
    settings.write_text(
        '[cluster.groups.old]\nnodes = "2"\n[cluster.groups.old.env]\nNCCL_IB_DISABLE = "1"\n'
    )
    placed = ["--place", "rollout=0-15", "--place", "train=16-23", "--config", str(settings)]
    for index in range(JOB["spec"]["completions"]):
        monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
        monkeypatch.setattr("sys.argv", [*NODE["command"], *placed, "--settings-only"])
        assert main() == Exit.DONE, capsys.readouterr().err
        cluster = yaml.safe_load(capsys.readouterr().out)["cluster"]
        assert set(cluster["place"]) == {"rollout=0-15", "train=16-23"}
        assert cluster["groups"]["old"]["nodes"] == "2"


@pytest.mark.parametrize(
    ("index", "code"), [("0", Exit.DONE), ("2", Exit.DONE), (None, Exit.USAGE), ("two", Exit.USAGE)]
)
def test_the_command_takes_its_rank_from_the_completion_index(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], index: str | None, code: Exit
) -> None:
    for name in ("RANK", "NODE_RANK", "SLURM_NODEID", "MASTER_ADDR", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)
    if index is not None:
        monkeypatch.setenv("JOB_COMPLETION_INDEX", index)
    monkeypatch.setattr("sys.argv", [*NODE["command"], "--settings-only"])
    assert main() == code
    said = capsys.readouterr()
    if code is Exit.DONE:
        assert yaml.safe_load(said.out)["cluster"]["num_nodes"] == JOB["spec"]["completions"]
    else:
        assert "JOB_COMPLETION_INDEX" in said.err
