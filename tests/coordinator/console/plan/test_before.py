"""run plan --model: what a run needs of GPUs that are not here."""

from pathlib import Path

import pytest

from coordinator.cli import main
from coordinator.start.estimate import MEMORIES, PEAKS
from tests.models import make_model


def run(*words: str) -> int:
    """Return the exit code of `run` with these words."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.argv", ["run", *words])
        return main()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("plan") / "model", seed=0)


def test_it_says_what_the_master_would_announce(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gpus", "2", "--gpu", "L4", "rollout.max_tokens=1000", "checkpoints.keep_last=2"]
    assert run("plan", "--model", str(model), *words) == 0
    assumed, memory, time, disk = capsys.readouterr().out.splitlines()
    assert assumed == "assumed   2 x L4 with 24 GB (--gpus, --gpu)"
    assert memory.startswith("memory    training takes ") and memory.endswith("of each GPU, which has 24")
    assert time.startswith("time      an iteration generates for ") and "if samples have 1000 tokens" in time
    assert disk.startswith("disk      an iteration writes ") and "; 2 are kept: " in disk


def test_adapters_need_no_state_on_the_disk(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "--model", str(model), "trainer.lora.rank=8") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["assumed", "memory", "time"]


def test_directories_may_be_on_the_cluster_alone(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", str(model), "tasks=absent.jsonl"]
    assert run(*words, "data_path=/mnt/none") == 0
    assert "not looked at, as --data-path /mnt/none is not here: tasks, re" in capsys.readouterr().err
    assert run(*words[:3], "tasks=builtin:products", "cluster.local_dir=/mnt/none") == 0
    assert run(*words, "cluster.local_dir=/mnt/none") == 2
    assert "absent.jsonl: no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--model", "MODEL", "--gpu", "V100"], "--gpu V100: not known; give one of B200, H200, H100"),
        (["--model", "/no/such/model"], "--model /no/such/model: no such directory"),
        (["--model", "EMPTY"], "--model EMPTY: "),
        (["--model", "builtin:tiny"], "it fits everywhere"),
        (["--model", "MODEL", "trainer.layuot=sharded"], "did you mean trainer.layout"),
        (["trainer.layout=sharded"], "settings go with --model, e.g. --model DIR --gpus 8"),
        (
            ["--model", "MODEL", "--gpus", "0"],
            "--gpus=0: give 1 or more; see run plan",
        ),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], error: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [word.replace("MODEL", str(model)).replace("EMPTY", str(tmp_path)) for word in words]
    assert run("plan", *given) == 2
    said = capsys.readouterr().err
    assert error.replace("EMPTY", str(tmp_path)) in said and "Traceback" not in said


def test_each_gpu_that_is_known_has_a_memory() -> None:
    assert MEMORIES.keys() == PEAKS.keys()
