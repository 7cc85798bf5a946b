"""`run verify` where an iteration cannot be made again."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.console.commands import verify
from coordinator.directory.chain import Chain


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["[rank 0] epoch 2", "run: --reward a:b: module 'a' cannot be imported"], "--reward a:b: module"),
        (["[rank 0] error: rank 0 failed in training", "run        /tmp/x"], "[rank 0] error: rank 0 failed"),
        (["nothing that tells"], "nothing that tells"),
        ([], ""),
    ],
)
def test_reason_is_the_line_that_says_why(lines: list[str], reason: str) -> None:
    assert verify._reason(lines).startswith(reason)


def test_it_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> bool:
        raise verify.IterationNotRepeatable("iteration 6 could not be made again: --reward a:b: no module")

    for name, stand_in in {
        "Run": lambda _: SimpleNamespace(run_dir=None),
        "last_start": lambda _: SimpleNamespace(settings={}),
        "base_model_dir": lambda *_: tmp_path,
        "model_files": lambda _: {},
        "policy_digest": lambda _: "",
        "read_chain": lambda *_: Chain(),
        "_comes_out_again": fail,
    }.items():
        monkeypatch.setattr(verify, name, stand_in)
    monkeypatch.setattr(verify.published, "checkpoints", lambda _: [6])
    assert verify.verify(tmp_path, None, files_only=False) == 1
    assert capsys.readouterr().err == "run: iteration 6 could not be made again: --reward a:b: no module\n"
