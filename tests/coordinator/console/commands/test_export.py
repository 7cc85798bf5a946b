"""`run export`: what may be uploaded, whole and verified, and nothing that only a run needs."""

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.cli import main
from coordinator.console.commands.export import _name_base, export
from coordinator.console.commands.model_card import model_card
from coordinator.directory.chain import write_proof
from coordinator.directory.layout import FORMAT, RunDir
from coordinator.directory.published import read_result
from coordinator.protocol.placement_records import Placement, publish_devices, publish_placement
from coordinator.protocol.records import GivenSettings, claim
from coordinator.settings.loading import build
from coordinator.settings.tree import SettingsError
from coordinator.start.run_json import find_run
from rollout.storage import hashing
from tests.coordinator.examples import record, run_dir_at, tree, write_checkpoint, write_json
from trainer.settings import LoraSettings, TrainerSettings


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """Two checkpoints, the first of them evaluated."""
    run_dir = run_dir_at(tmp_path / "adder")
    fixed = {"model": {"name": "some/model", "digest": "ba5e"}, "tasks": {"name": "sums.jsonl"}}
    write_json(run_dir.run_json, {"run_id": "c0ffee", "format": FORMAT, "fixed": fixed})
    for iteration in (1, 2):
        write_checkpoint(run_dir.checkpoint(iteration), iteration, content=b"weights %d" % iteration)
        write_proof(run_dir, "c0ffee", "ba5e", run_dir.checkpoint(iteration))
    lines = [{"iteration": 2, "kind": "both", "reward": 0.25, "eval_reward": 0.75}]
    run_dir.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return run_dir


def test_export_holds_the_model_and_a_card_that_the_hub_reads(run_dir: RunDir, tmp_path: Path) -> None:
    out = tmp_path / "for" / "the_hub"
    assert export(run_dir.root, 1, out) == ["config.json", "model.safetensors", "README.md", "proof.json"]
    assert tree(out) == {"config.json", "model.safetensors", "README.md", "proof.json"}
    assert (out / "model.safetensors").read_bytes() == b"weights 1"
    _, head, text = (out / "README.md").read_text().split("---\n")
    assert yaml.safe_load(head)["base_model"] == "some/model"
    assert "Evaluation: 0.750\n" in text and "Iterations of training: 1" in text and "sums.jsonl" in text
    result = read_result(run_dir.checkpoint(1))
    assert json.loads((out / "proof.json").read_text()) == {
        "run_id": "c0ffee",
        "base_policy": "ba5e",
        "iteration": 1,
        "trained_from": result.base_policy,
        "samples_sha256": None,
        "batch_sha256": result.batch_sha256,
        "result_sha256": hashlib.sha256(result.to_json()).hexdigest(),
        "policy": result.policy,
    }
    assert tree(out.parent) == {"the_hub", *(f"the_hub/{name}" for name in tree(out))}


def test_named_chat_templates_are_exported_in_their_folder(run_dir: RunDir, tmp_path: Path) -> None:
    template = run_dir.checkpoint(1) / "additional_chat_templates" / "tool_use.jinja"
    template.parent.mkdir()
    template.write_text("{{ tools }}")
    named = "additional_chat_templates/tool_use.jinja"
    result = read_result(run_dir.checkpoint(1))
    added = result.model_copy(update={"files": {**result.files, named: hashing.file_facts(template)}})
    (run_dir.checkpoint(1) / "result.json").write_bytes(added.to_json())
    assert named in export(run_dir.root, 1, tmp_path / "out")
    assert (tmp_path / "out" / named).read_text() == "{{ tools }}"
    template.write_text("damaged")
    with pytest.raises(SettingsError, match=r"tool_use\.jinja is missing or damaged; nothing was exported"):
        export(run_dir.root, 1, tmp_path / "other")


def test_card_of_a_model_that_sees_says_so(run_dir: RunDir, tmp_path: Path) -> None:
    for config, task in (
        ({}, "text-generation"),
        ({"image_token_id": 3, "vision_config": {}}, "image-text-to-text"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert f"pipeline_tag: {task}\n" in model_card(run_dir, find_run(run_dir.root), 1, tmp_path)


@pytest.mark.parametrize(
    ("model", "base", "started_from"),
    [
        ("some/model", "some/model", "some/model"),
        ("/cache/hub/models--some--model/snapshots/0a1b", "some/model", "some/model"),
        ("/shared/models/mine", None, "mine"),
    ],
)
def test_exported_adapter_names_the_base_model_on_the_hub_where_it_is_known(
    run_dir: RunDir, tmp_path: Path, model: str, base: str | None, started_from: str
) -> None:
    run = find_run(run_dir.root)
    run["fixed"]["model"]["name"] = model
    config = write_json(tmp_path / "out" / "adapter_config.json", {"base_model_name_or_path": "/on/a/node"})
    _name_base(config.parent, run)
    assert json.loads(config.read_text())["base_model_name_or_path"] == (base or model)
    card = model_card(run_dir, run, 1, config.parent)
    assert yaml.safe_load(card.split("---\n")[1]).get("base_model") == base
    assert f"Started from: {started_from}\n" in card


def test_adapter_is_exported_merged_with_a_card_of_a_whole_model(
    run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_dir.checkpoint(1) / "adapter_config.json"
    config.write_text('{"base_model_name_or_path": "/on/a/node"}')
    result = read_result(run_dir.checkpoint(1))
    (run_dir.checkpoint(1) / "config.json").unlink()
    whole = {name: facts for name, facts in result.files.items() if name != "config.json"}
    adapter = result.model_copy(update={"files": {**whole, config.name: hashing.file_facts(config)}})
    (run_dir.checkpoint(1) / "result.json").write_bytes(adapter.to_json())

    def merge(argv: list[str], **_options: object) -> subprocess.CompletedProcess[str]:
        """Write what trainer.checkpoint.merge would, from an adapter that names its base as the run does."""
        adapter, out, dtype = map(Path, argv[-3:])
        assert json.loads((adapter / config.name).read_text())["base_model_name_or_path"] == "/on/a/node"
        out.mkdir()
        (out / "model.safetensors").write_text(str(dtype))
        (out / "proof.json").write_text("of the base model, which was exported too")
        return subprocess.CompletedProcess(argv, 0, "", "")

    monkeypatch.setattr(subprocess, "run", merge)
    out = tmp_path / "merged"  # as many would call it
    assert export(run_dir.root, 1, out, merge=True, dtype="float16") == [
        "model.safetensors",
        "README.md",
        "proof.json",
    ]
    assert (out / "model.safetensors").read_text() == "float16"
    assert "library_name: transformers" in (out / "README.md").read_text()
    assert tree(out) == {"model.safetensors", "README.md", "proof.json"}
    assert "of the base" not in (out / "proof.json").read_text()


def test_model_of_a_run_with_adapters_that_has_taken_no_step_is_merged_as_it_is(
    run_dir: RunDir, tmp_path: Path
) -> None:
    result = read_result(run_dir.checkpoint(1))
    adapters = result.model_copy(update={"settings": TrainerSettings(lora=LoraSettings(rank=8))})
    (run_dir.checkpoint(1) / "result.json").write_bytes(adapters.to_json())
    export(run_dir.root, 1, tmp_path / "merged", merge=True)
    assert (tmp_path / "merged" / "model.safetensors").read_bytes() == b"weights 1"


def test_card_of_a_run_from_fine_tuning_follows_it_to_the_base_model(run_dir: RunDir, tmp_path: Path) -> None:
    """From a checkpoint of another run, from an export of that, and with adapters beside."""
    start(run_dir, {"trainer.algorithm": "sft"})
    export(run_dir.root, 1, tmp_path / "sft-model")
    card = (tmp_path / "sft-model" / "README.md").read_text()
    assert yaml.safe_load(card.split("---\n")[1])["tags"] == ["sft"]
    assert "Reward" not in card and "Algorithm: sft" in card and "AutoModelForCausalLM" in card
    checkpoint = f"{run_dir.checkpoint(1)}"
    for name, model, words, more in (
        ("rl", checkpoint, "adder, iteration 1 (sft of some/model)", {"trainer.algorithm": "grpo"}),
        ("later", f"{tmp_path}/sft-model", "sft-model (some/model)", {"trainer.lora.rank": 16}),
    ):
        other = run_dir_at(tmp_path / name)
        fixed = {"model": {"name": model, "digest": "1"}, "tasks": {"name": "/data/sums.jsonl"}}
        write_json(other.run_json, {"run_id": name, "format": FORMAT, "fixed": fixed})
        start(other, {"rollout.reward": "numeric", "eval_tasks": "/data/test.jsonl", **more})
        write_checkpoint(other.checkpoint(2), 2)
        scored = {"iteration": 2, "kind": "both", "reward": 0.5, "eval_reward": 0.75, "eval_error": 0.05}
        other.metrics.write_text(json.dumps(scored) + "\n")
        export(other.root, 2, tmp_path / f"{name}-model")
        _, head, text = (tmp_path / f"{name}-model" / "README.md").read_text().split("---\n")
        assert f"- Started from: {words}\n" in text
        tags = ["reinforcement-learning", "grpo" if name == "rl" else "lora"]
        assert yaml.safe_load(head)["base_model"] == "some/model" and yaml.safe_load(head)["tags"] == tags
        assert "- Evaluation: 0.750 ± 0.098 on test.jsonl, of iteration 1\n" in text
        assert "- Samples a step: 512\n" in text and "- Learning rate: 1e-06\n" in text
        assert "- Reward: numeric\n" in text and ("- LoRA: rank 16" in text) == (name == "later")


def test_whole_model_is_exported_in_another_number_type(
    run_dir: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each file of weights, and the config; what is no floating-point number stays. An adapter does not."""
    import torch
    from safetensors.torch import load_file, save_file

    directory = run_dir.checkpoint(2)
    weights = {"a": torch.tensor([1.0, 1.0001]), "steps": torch.tensor([7])}
    save_file(weights, directory / "model.safetensors")
    config = {"dtype": "float32", "text_config": {"torch_dtype": "float32", "layers": 2}}
    (directory / "config.json").write_text(json.dumps(config))
    names = ("model.safetensors", "config.json")
    result = read_result(directory)
    facts = {**result.files, **{name: hashing.file_facts(directory / name) for name in names}}
    (directory / "result.json").write_bytes(result.model_copy(update={"files": facts}).to_json())
    export(run_dir.root, 2, tmp_path / "out", dtype="bfloat16")
    cast = load_file(tmp_path / "out" / "model.safetensors")
    assert cast["a"].equal(weights["a"].bfloat16()) and cast["steps"].equal(weights["steps"])
    text_config = {"dtype": "bfloat16", "layers": 2}
    made = json.loads((tmp_path / "out" / "config.json").read_text())
    assert made == {"dtype": "bfloat16", "text_config": text_config}
    modes = {(tmp_path / "out" / name).stat().st_mode for name in ("README.md", "model.safetensors")}
    assert len(modes) == 1, "who may read the card may read the weights"
    (directory / "adapter_config.json").write_text("{}")
    (directory / "config.json").unlink()
    with pytest.raises(SettingsError, match="--dtype bfloat16: iteration 2 is an adapter; add --merge for"):
        export(run_dir.root, 2, tmp_path / "other", dtype="bfloat16")


def start(run_dir: RunDir, settings: dict[str, Any]) -> None:
    """Publish the record of a start with these settings."""
    tree = build({"model": "some/model", "tasks": "/data/sums.jsonl", **settings})
    given = GivenSettings(host="node", settings=settings)
    claim(run_dir, record(settings=tree, members={0: 1}).model_copy(update={"given": given}))


def test_newest_checkpoint_is_exported_by_default(run_dir: RunDir, tmp_path: Path) -> None:
    export(run_dir.root, None, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == b"weights 2"
    assert "reward" not in (tmp_path / "out" / "README.md").read_text().partition("# adder")[2]


def test_run_of_two_crews_is_exported_with_what_measured_the_policy(run_dir: RunDir, tmp_path: Path) -> None:
    publish_placement(run_dir.root, Placement(2, ("rollout=0", "train=1")))
    for machine in (0, 1):
        publish_devices(run_dir.root, machine, f"node-{machine}", 1)
    measured = {1: 0, 2: 0, 3: 1, 4: 2}  # max_async_level=1
    lines = [
        {"iteration": n, "kind": "both", "policy_iteration": policy, "reward": n / 10, "eval_reward": None}
        for n, policy in measured.items()
    ]
    run_dir.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert "model.safetensors" in export(run_dir.root, 2, tmp_path / "out")
    assert "Mean reward of its samples: 0.4" in (tmp_path / "out" / "README.md").read_text()


def test_delta_is_not_exported(run_dir: RunDir, tmp_path: Path) -> None:
    write_checkpoint(run_dir.checkpoint(3), 3, b"weights 3", before=run_dir.checkpoint(2))
    assert any(name.endswith(".delta") for name in tree(run_dir.checkpoint(3)))
    export(run_dir.root, 3, tmp_path / "out")
    assert tree(tmp_path / "out") == {"config.json", "model.safetensors", "README.md"}


def test_damaged_checkpoint_is_not_exported(run_dir: RunDir, tmp_path: Path) -> None:
    (run_dir.checkpoint(2) / "model.safetensors").write_bytes(b"weightz 2")
    before = tree(tmp_path)
    with pytest.raises(SettingsError, match=r"model.safetensors is missing or damaged; nothing was exported"):
        export(run_dir.root, 2, tmp_path / "out")
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--iteration", "7"], "has no such checkpoint; there are 1, 2"),
        (["--iteration", "seven"], "--iteration seven: give the number of an iteration"),
        (["--log-path", "nowhere"], "no run there"),
        (["-o", "adder/run.json/out"], "run.json/out: File exists"),
        (["-o", "adder"], "adder: is there already"),
        (["--merge"], "--merge: iteration 2 of"),
        (["--dtype", "int8"], "--dtype int8: give bfloat16, float16, float32"),
    ],
)
def test_bad_input_of_export_is_one_line(
    run_dir: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(run_dir.root.parent)
    before = tree(run_dir.root.parent)
    monkeypatch.setattr("sys.argv", ["run", "export", "--log-path", "adder", "-o", "out", *arguments])
    assert main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert tree(run_dir.root.parent) == before
