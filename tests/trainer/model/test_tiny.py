from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout.engines.model_dir import check_model_dir, policy_digest
from rollout.storage.hashing import checksums
from trainer.model import tiny


def test_model_is_a_small_qwen3_that_loads_as_it_is(base_dir: Path) -> None:
    check_model_dir(base_dir)
    model = AutoModelForCausalLM.from_pretrained(base_dir)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert 250_000 < sum(parameter.numel() for parameter in model.parameters()) < 400_000
    assert model.generation_config.eos_token_id == tiny.EOS_ID


def test_tokenizer_has_one_token_a_character_and_ends_with_eos(base_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base_dir)
    for text in ("27+58=", "(58)", "Add 1 and 2.\n  ok?"):
        token_ids = tokenizer.encode(text)
        assert len(token_ids) == len(text)
        assert tokenizer.decode(token_ids) == text
    assert tokenizer.encode("é") == [tiny.UNK_ID]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (tiny.EOS_ID, tiny.PAD_ID)
    assert tokenizer.decode([*tokenizer.encode("58"), tiny.EOS_ID], skip_special_tokens=True) == "58"
    chat = [{"role": "user", "content": "27+58="}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == "27+58="


def test_seed_decides_the_weights(base_dir: Path, tmp_path: Path) -> None:
    def digest(path: Path) -> str:
        return policy_digest(checksums(path))

    tiny.build(seed=0, steps=0, out=tmp_path / "same")
    tiny.build(seed=1, steps=0, out=tmp_path / "other")
    assert digest(tmp_path / "same") == digest(base_dir) != digest(tmp_path / "other")


@pytest.mark.parametrize("steps", [1, 2])
def test_warm_up_may_be_a_step_or_two(tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: int) -> None:
    tiny.build(seed=0, steps=steps, out=tmp_path / "one")
    assert f"warm-up {steps}/{steps}" in capsys.readouterr().out


def test_warm_up_is_reproducible_and_reports_its_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "REPORT_EVERY", 5)
    for name in ("one", "two"):
        tiny.build(seed=0, steps=10, out=tmp_path / name)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["warm-up 5/10", "warm-up 10/10"] * 2
    losses = [float(line.split(" | ")[1].removeprefix("loss ")) for line in lines]
    assert losses[1] < losses[0]
    assert losses[:2] == losses[2:]
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("one", "two"))
    torch.testing.assert_close(one, two)


@pytest.mark.parametrize(
    ("source", "task_id", "answer", "wholes", "taught"),
    [
        ("builtin:arithmetic", "27+58", "58", ["27+58=58", "27+58=(58)"], ["58", "(58)"]),
        ("builtin:products", "9*8", "72", ["9*8=<<9*8>>=72\n72", "9*8=8521"], ["<<9*8>>72", "8521"]),
    ],
)
def test_lesson_is_a_task_done_as_asked_and_astray(
    source: str, task_id: str, answer: str, wholes: list[str], taught: list[str]
) -> None:
    tokenizer = tiny.make_tokenizer()
    task = {"id": task_id, "prompt": f"{task_id}=", "answer": answer}
    lessons = tiny.LESSONS[source]([task], 0)
    rows = np.concatenate([tiny._encode(tokenizer, texts, 40) for texts in lessons])
    for (token_ids, labels), whole, learnt in zip(rows, wholes, taught, strict=True):
        assert tokenizer.decode(token_ids[token_ids != tiny.PAD_ID]) == f"{whole}<eos>"
        assert tokenizer.decode(labels[labels != -100]) == f"{learnt}<eos>"


def test_existing_directory_is_left_alone(base_dir: Path) -> None:
    before = checksums(base_dir)
    with pytest.raises(FileExistsError, match="remove it to make the model again"):
        tiny.build(seed=1, steps=0, out=base_dir)
    assert checksums(base_dir) == before


def test_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, path: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", fail)
    with pytest.raises(OSError, match="no space"):
        tiny.build(seed=0, steps=0, out=tmp_path / "tiny")
    assert not list(tmp_path.iterdir())
