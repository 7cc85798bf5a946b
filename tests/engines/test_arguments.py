"""vLLM says before a start which of its arguments it would refuse."""

from pathlib import Path

import pytest

from rollout.engines.kinds.vllm import Vllm
from rollout.settings import EngineSettings

pytest.importorskip("vllm")


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("nosuch=3", "unrecognized arguments: --nosuch=3"),
        ("max-model-len=100000", "max_model_len (100000) is greater than"),
        (
            "gpu-memory-utilization=2",
            "gpu_memory_utilization: Input should be less than or equal to 1, got 2",
        ),
        ("max-num-seqs=4", None),
    ],
)
def test_argument_is_refused_with_the_reason_of_vllm(
    model_dir: Path, argument: str, reason: str | None
) -> None:
    name, _, value = argument.partition("=")
    refusal = Vllm(EngineSettings(kind="vllm", args={name: int(value)}), gpus=0).refusal(model_dir)
    assert refusal is None if reason is None else reason in str(refusal)
