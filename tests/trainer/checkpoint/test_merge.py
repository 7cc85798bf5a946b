"""An adapter that cannot be added to its base says why in one line. What the sum is: test_training.py."""

import json
import runpy
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.console.commands import export
from coordinator.settings.tree import SettingsError
from rollout.engines.model_dir import WeightsError
from tests.models import make_model
from trainer.checkpoint import dequantise, merge
from trainer.model import lora
from trainer.settings import LoraSettings


@pytest.fixture
def adapter(base_dir: Path, tmp_path: Path) -> Path:
    """A new adapter of a tiny model: its B is 0."""
    from transformers import AutoModelForCausalLM

    model = lora.wrap(AutoModelForCausalLM.from_pretrained(base_dir), LoraSettings(rank=2))
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_sum_has_the_weights_and_the_tokenizer_of_its_base(
    adapter: Path, base_dir: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (adapter / "chat_template.jinja").write_text("of the adapter")
    base_dir = Path(shutil.copytree(base_dir, tmp_path / "base"))
    of_base = json.loads((adapter / "adapter_config.json").read_text())
    of_base["base_model_name_or_path"] = str(base_dir)
    (adapter / "adapter_config.json").write_text(json.dumps(of_base))
    beside = ("additional_chat_templates/tool_use.jinja", "preprocessor_config.json", "own.model", "own.py")
    for name in beside:
        (base_dir / name).parent.mkdir(exist_ok=True)
        (base_dir / name).write_text(f'"{name}"')
    merge.merge(adapter, tmp_path / "out")
    assert all((tmp_path / "out" / name).read_text() == f'"{name}"' for name in beside)
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    base, made = (AutoModelForCausalLM.from_pretrained(path) for path in (base_dir, tmp_path / "out"))
    assert all(map(lambda a, b: a.equal(b), base.state_dict().values(), made.state_dict().values()))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(tokenizer("27+58=")["input_ids"]) == 6
    assert tokenizer.chat_template == {"default": "of the adapter", "tool_use": f'"{beside[0]}"'}


def test_sum_is_written_in_another_number_type(adapter: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    merge.merge(adapter, tmp_path / "out", torch.bfloat16)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert {weight.dtype for weight in made.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("targets", "more", "rows"),
    [
        (["lm_head"], {}, None),
        (["embed_tokens"], {}, None),
        (["q_proj"], {}, None),
        (["q_proj"], {"modules_to_save": ["lm_head"]}, None),
        (["q_proj"], {"modules_to_save": ["embed_tokens", "norm"]}, None),
        (["q_proj"], {"trainable_token_indices": [5, 6], "use_dora": True}, None),
        (["q_proj"], {}, 60),
        (["q_proj"], {"modules_to_save": ["embed_tokens", "lm_head"]}, 60),
    ],
)
def test_sum_is_the_policy_where_head_and_embeddings_are_one_tensor(
    targets: list[str], more: dict[str, Any], rows: int | None, tmp_path: Path
) -> None:
    """`rows`: of the embeddings, to which tokens were added before the adapter."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base_dir = make_model(tmp_path / "base", seed=0)
    base = AutoModelForCausalLM.from_pretrained(base_dir)
    assert base.config.tie_word_embeddings
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, of what is tested here
        base.resize_token_embeddings(rows)
        config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=targets, **more)
        policy: Any = get_peft_model(base, config)
        for weight in policy.parameters():
            if weight.requires_grad:
                weight.data += torch.randn_like(weight) * 0.3
        policy.save_pretrained(tmp_path / "adapter", save_embedding_layers="auto" if rows else False)
        merge.merge(tmp_path / "adapter", tmp_path / "out")
    ids = torch.tensor([[5, 6, 7, 8]])
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert torch.allclose(merged(ids).logits, policy(ids).logits, atol=1e-3)


def test_adapter_that_adds_no_weights_is_refused(
    base_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import PromptTuningConfig

    config = PromptTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=2, base_model_name_or_path=str(base_dir)
    )
    config.save_pretrained(str(tmp_path))
    monkeypatch.setattr("sys.argv", ["merge", str(tmp_path), str(tmp_path / "out")])
    assert merge.main() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "is of the kind PROMPT_TUNING, tokens before a prompt, which no weights can hold" in line


def test_base_that_is_gone_is_named(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(argv: list[str], **_: Any) -> SimpleNamespace:  # in this process: another one imports for seconds
        monkeypatch.setattr("sys.argv", argv[argv.index("-m") + 1 :])
        monkeypatch.delitem(sys.modules, sys.argv[0])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(sys.argv[0], run_name="__main__")
        return SimpleNamespace(returncode=ended.value.code, stderr=capsys.readouterr().err)

    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "/gone"}))
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SettingsError, match="adapter is an adapter, and could not be added") as raised:
        export.merge_adapter(adapter, tmp_path / "out")
    assert "/gone" in str(raised.value) and "\n" not in str(raised.value)


def test_without_peft_it_says_what_to_install(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setattr("sys.argv", ["merge", str(adapter), str(tmp_path / "out")])
    assert merge.main() == 1 and capsys.readouterr().err.endswith("pip install -e '.[lora]'\n")


@pytest.mark.parametrize("main", [merge.main, dequantise.main])
@pytest.mark.parametrize("words", [[], ["a"], ["a", "b", "--dtype"], ["a", "b", "float32", "c"]])
def test_words_that_a_command_does_not_know_are_refused_with_its_usage(
    main: Callable[[], int],
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["command", *words])
    assert main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("usage: ") and line.endswith(f"; got {' '.join(words) or 'nothing'}")


def test_sum_with_tensors_that_are_missing_is_refused(adapter: Path, base_dir: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    def without(path: Path, part: str) -> None:
        tensors = load_file(path)
        del tensors[next(name for name in sorted(tensors) if part in name)]
        save_file(tensors, path, metadata={"format": "pt"})

    without(adapter / "adapter_model.safetensors", "q_proj.lora_B")
    with pytest.raises(UserWarning, match=r"missing adapter keys .*q_proj.lora_B"):
        merge.merge(adapter, tmp_path / "out")
    base = Path(shutil.copytree(base_dir, tmp_path / "base"))
    without(base / "model.safetensors", "up_proj")
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(base)
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=r"no values for 1 tensors .*up_proj"):
        merge.merge(adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()
