"""Settings: what a person may type, what comes of it, and the one line that says what was wrong."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.console.commands.local import as_overrides
from coordinator.settings import settings_file
from coordinator.settings.cluster import parse_weights
from coordinator.settings.loading import (
    OPTIONS,
    TINY_DEFAULTS,
    build,
    check_each,
    contradictions,
    flatten,
    option_name,
    overlay,
    parse_override,
)
from coordinator.settings.settings_file import read_file
from coordinator.settings.tree import RunSettings, SettingsError


def refusal(**settings: Any) -> str:
    """The message about settings whose dotted names are written with `__`."""
    return refused({name.replace("__", "."): value for name, value in settings.items()})


def refused(settings: dict[str, Any], lines: int = 1) -> str:
    with pytest.raises(SettingsError) as caught:
        build(settings)
    text = str(caught.value)
    assert text.count("\n") == lines - 1
    return text


# ---- weights


def test_wrong_number_of_weights_names_both_numbers_and_an_example() -> None:
    assert refusal(cluster__rank_weights="2,1", cluster__num_nodes=3) == (
        "--rank-weights 2,1 has 2 weights for --num-nodes 3; give --num-nodes 2, or one weight per "
        "node, e.g. 2,1,1"
    )


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ("2,0,1", "'0' is not positive"),
        ("2,-1,1", "'-1' is not positive"),
        ("2,nan,1", "'nan' is not positive"),
        ("2,inf,1", "'inf' is not"),
        ("2,x,1", "'x' is not a number; give one per node, e.g. 2,1,1"),
        ("2,,1", "'' is not a number"),
        ("", "'' is not a number"),
    ],
)
def test_weight_that_is_no_positive_number_is_named(weights: str, reason: str) -> None:
    text = refusal(cluster__rank_weights=weights, cluster__num_nodes=3)
    assert text.startswith(f"--rank-weights {weights}: ") and reason in text


@pytest.mark.parametrize("weights", [[1, 0], [1, -2.5], [1, "x"], [1, float("inf")], [1, float("nan")]])
def test_weights_of_a_file_or_override_are_checked_too(weights: list[Any]) -> None:
    assert refusal(cluster__rank_weights=weights, cluster__num_nodes=2).startswith("--rank-weights")


@pytest.mark.parametrize("given", ["2,1.5,0.25", [2, 1.5, 0.25]])
def test_weights_may_be_fractions_and_come_as_text_or_numbers(given: Any) -> None:
    settings = build({"cluster.num_nodes": 3, "cluster.rank_weights": given})
    assert [settings.cluster.weight(rank) for rank in range(3)] == [2, 1.5, 0.25]


def test_weights_are_equal_by_default() -> None:
    assert build({"cluster.num_nodes": 2}).cluster.weight(1) == 1.0


@given(st.lists(st.floats(min_value=1e-9, max_value=1e9), min_size=1, max_size=6))
def test_weights_parse_to_the_numbers_that_were_typed(weights: list[float]) -> None:
    assert parse_weights(",".join(map(repr, weights))) == weights


# ---- values


def test_all_wrong_values_are_refused_at_once_with_what_to_give() -> None:
    wrong: dict[str, Any] = {
        "trainer.overlong": True,
        "trainer.ratio": "gspo",
        "trainer.advantage": False,
        "trainer.compute_dtype": "float16",
        "trainer.clip_high": None,
        "engine.sleep": 7,
        "iterations": 0,
    }
    first, *lines = refused(wrong, lines=8).split("\n  ")
    assert first == "7 wrong values; change each of them:" and len(lines) == 7
    endings = {line.partition("=")[0].removeprefix("--"): line for line in lines}
    for name, advice in {
        "trainer.overlong": "did you mean drop?",
        "trainer.ratio": "did you mean trainer.algorithm=gspo?",
        "trainer.advantage": "did you mean centred?",
        "trainer.compute_dtype": "did you mean bfloat16?",
    }.items():
        assert endings[name].endswith(advice)
    assert endings["trainer.clip_high"].startswith("trainer.clip_high=null: ")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("rollot.seed", "rollout.seed=1"),
        ("learning_rate", "trainer.learning_rate=1"),
        ("trainer.lr_rate", "trainer.learning_rate=1"),
        ("trainer.node_timeout_s", "cluster.node_timeout_s=1"),
        ("Model", "model"),
        ("rolout", "rollout"),
    ],
)
def test_unknown_setting_is_refused_with_the_nearest_name(name: str, nearest: str) -> None:
    text = refused({name: 1})
    assert text == f"unknown setting {name}; did you mean {nearest}?"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("cluster.num_nodes", 0, "--num-nodes=0: give 1 or more"),
        ("cluster.num_nodes", "x", "--num-nodes=x: give a whole number"),
        ("iterations", 0, "--iterations=0: give 1 or more"),
        ("trainer.learning_rate", [], "trainer.learning_rate= is empty (a variable that is not set?)"),
        ("rollout.reasoning_end", [], "rollout.reasoning_end= is empty (a variable that is not set?)"),
        ("eval.interval", -1, "--eval-interval=-1: give 0 or more"),
        ("cluster.node_timeout_s", "soon", "--node-timeout=soon: give a number"),
        ("cluster.rejoin_timeout_s", 0, "--rejoin-timeout=0: give more than 0"),
        ("cluster.on_node_failure", "hope", "--on-node-failure=hope: give wait, shrink or abort"),
        ("rl_phase", "all", "--rl-phase=all: give both, rollout or update"),
        (
            "rollout.top_k",
            -1,
            "rollout.top_k=-1: give 0 or more; did you mean 0?",
        ),
        ("trainer.layout", "HYBRID_SHARD", "trainer.layout=HYBRID_SHARD: give auto, rep"),
        (
            "trainer.kl",
            0.04,
            "trainer.kl=0.04: give off, k1, k2 or k3; did you mean k3 tra",
        ),
        (
            "eval.interval",
            -1,
            "--eval-interval=-1: give 0 or more; did you mean 0?",
        ),
        ("engine.kind", "sglang", "--engine=sglang: give auto, vllm or torch"),
        ("trainer.learning_rate", -1, "trainer.learning_rate=-1: give more than 0"),
        ("trainer.learning_rate", float("inf"), "trainer.learning_rate=inf: give a finite number"),
        ("trainer.learning_rate", float("nan"), "trainer.learning_rate=nan: give a finite number"),
        ("trainer.betas", [0.9], "trainer.betas"),
        ("rollout.top_p", 1.5, "rollout.top_p=1.5: give 1 or less"),
        ("rollout.stop", [1], "rollout.stop=1: give a text"),
        ("checkpoints.delta", "some", "checkpoints.delta=some: give true or false"),
        ("checkpoints.keep_last", 1, "checkpoints.keep_last=1: give 2 or more"),
        ("engine.args", 5, "engine.args=5: it has entries; give each as engine.args.NAME=VALUE"),
        ("rollout.chat_template", "a.jinja", "rollout.chat_template=a.jinja: it has entries; give each"),
        ("model", None, "--model=null: give a text"),
    ],
)
def test_value_out_of_range_is_refused_by_the_name_a_person_types(
    key: str, value: Any, expected: str
) -> None:
    assert refused({key: value}).startswith(expected)


TRUE_OR_FALSE = [
    ("iterations", True, "--iterations=true: give a whole number, not true or false"),
    ("rollout.samples_per_task", True, "rollout.samples_per_task=true: give a whole number"),
    ("trainer.lora.rank", False, "trainer.lora.rank=false: give a whole number"),
    ("trainer.weight_decay", False, "trainer.weight_decay=false: give a number"),
    ("trainer.betas", [True, 0.9], "trainer.betas=true,0.9: give a number"),
    ("cluster.expect_gpus", True, "--expect-gpus=true: give a whole number"),
]


@pytest.mark.parametrize(("key", "value", "expected"), TRUE_OR_FALSE)
def test_true_or_false_is_no_number(key: str, value: Any, expected: str) -> None:
    assert refused({key: value}).startswith(expected)
    with pytest.raises(SettingsError) as error:  # as a worker is answered
        check_each({key: value})
    assert str(error.value).startswith(expected)


@pytest.mark.parametrize("given", [["q_proj", "v_proj"], "[q_proj,v_proj]", "q_proj,v_proj"])
def test_modules_with_adapters_may_be_a_list(given: Any) -> None:
    assert build({"trainer.lora.targets": given}).trainer.lora.targets == "q_proj,v_proj"


def test_true_or_false_is_no_share_of_a_source() -> None:
    assert refused({"rollout.ratio.easy": True}).startswith("rollout.ratio={'easy': True}: give a number")


@pytest.mark.parametrize("weights", [None, "1,1"])
def test_node_timeout_must_be_longer_than_two_beats(weights: str | None) -> None:
    text = refusal(cluster__node_timeout_s=4, cluster__num_nodes=2, cluster__rank_weights=weights)
    assert text == "--node-timeout 4 must be more than two beats (cluster.beat_s=2)"


def test_argument_of_the_server_below_a_value_that_is_no_table_is_refused() -> None:
    assert "engine.args" in refused({"engine.args": 5, "engine.args.seed": 1})


def test_arguments_of_the_server_may_have_any_name() -> None:
    settings = build({"engine.args": {"max-num-seqs": 8}, "engine.args.seed": 1})
    assert settings.engine.args == {"max-num-seqs": 8, "seed": 1}


def test_building_leaves_what_was_given_as_it_was() -> None:
    given = {"engine.args": {"seed": 1}, "engine.args.dtype": "half"}
    build(given)
    assert given["engine.args"] == {"seed": 1}


@pytest.mark.parametrize("split", ["train-only", "eval-only"])
def test_rollout_split_without_a_rollout_is_refused(split: str) -> None:
    assert refusal(rollout_split=split, rl_phase="update") == (
        f"--rollout-split {split} needs a rollout, but --rl-phase is update; leave one of them out"
    )


def test_delta_of_an_adapter_is_refused() -> None:
    assert refusal(checkpoints__delta=True, trainer__lora__rank=8) == (
        "checkpoints.delta=true with trainer.lora.rank=8: a checkpoint holds only the adapter, which is "
        "small; leave one of them out"
    )


def test_eval_only_makes_nothing_to_train_on() -> None:
    assert "add --rl-phase rollout" in refusal(rollout_split="eval-only")


@pytest.mark.parametrize(
    "settings",
    [
        {"rl_phase": "rollout", "rollout_split": "eval-only"},
        {"rl_phase": "rollout", "rollout_split": "train-only"},
        {"rl_phase": "both", "rollout_split": "train-only"},
    ],
)
def test_rollout_split_that_leaves_something_to_do_is_taken(settings: dict[str, Any]) -> None:
    assert build(settings).rollout_split == settings["rollout_split"]


# ---- where they come from


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("trainer.learning_rate=1e-6", "trainer.learning_rate", 1e-6),
        ("rollout.seed=7", "rollout.seed", 7),
        ("trainer.keep_alive=false", "trainer.keep_alive", False),
        ("iterations=null", "iterations", None),
        ("cluster.rank_weights=2,1,1", "cluster.rank_weights", [2, 1, 1]),
        ("engine.args.enforce-eager=True", "engine.args.enforce-eager", True),
        ('rollout.stop=["a","b"]', "rollout.stop", ["a", "b"]),
        ('engine.args={"seed": 1}', "engine.args", {"seed": 1}),
        ("model=Qwen/Qwen3-8B", "model", "Qwen/Qwen3-8B"),
        ("rollout.reward=a:b=c", "rollout.reward", "a:b=c"),
        ("tasks=", "tasks", ""),
    ],
)
def test_override_is_a_dotted_name_and_a_value(text: str, key: str, value: Any) -> None:
    assert parse_override(text) in [(key, value), (key, [] if value == "" else value)]


@given(
    st.dictionaries(
        st.sampled_from(sorted(OPTIONS)),
        st.one_of(st.none(), st.text(), st.integers(), st.floats(allow_nan=False), st.lists(st.integers())),
    )
)
def test_settings_written_as_arguments_say_the_same(settings: dict[str, Any]) -> None:
    assert dict(map(parse_override, as_overrides(settings))) == settings


@pytest.mark.parametrize("text", ["foo", "=1", "", "--nodes"])
def test_argument_that_is_no_override_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="neither an option nor key=value, e"):
        parse_override(text)


TOML = """
model = "/models/m"
[cluster]
num_nodes = 2
rank_weights = [2, 1]
[engine.args]
"max-num-seqs" = 8
"""
YAML = """
model: /models/m
cluster: {num_nodes: 2, rank_weights: [2, 1]}
engine: {args: {max-num-seqs: 8}}
"""
JSON = json.dumps(
    {
        "model": "/models/m",
        "cluster": {"num_nodes": 2, "rank_weights": [2, 1]},
        "engine": {"args": {"max-num-seqs": 8}},
    }
)


@pytest.mark.parametrize(("suffix", "text"), [("toml", TOML), ("yaml", YAML), ("yml", YAML), ("json", JSON)])
def test_config_files_of_each_kind_say_the_same(tmp_path: Path, suffix: str, text: str) -> None:
    file = tmp_path / f"config.{suffix}"
    file.write_text(text)
    assert read_file(file) == {
        "model": "/models/m",
        "cluster.num_nodes": 2,
        "cluster.rank_weights": [2, 1],
        "engine.args": {"max-num-seqs": 8},
    }


@pytest.mark.parametrize("name", ["empty.yaml", "empty.toml"])
def test_empty_config_file_says_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert read_file(tmp_path / name) == {}


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.toml", b"model = ", "Invalid value"),
        ("a.toml", b"model = ex-rl", "Invalid value (at line 1, column 9); put texts in quotes"),
        ("a.toml", b"\xff\xfe", "byte 1 is not UTF-8"),
        ("a.yaml", b"a: [1, 2\nb: }", "line 2: expected ',' or ']', but got"),
        ("a.yaml", b"a: \x07", "special characters"),
        ("a.yaml", b"\xff\xfe\xff", "byte 1 is not UTF-8; save the file as UTF-8"),
        ("a.yaml", b"- model", "expected settings by name, found list"),
        ("a.json", b"5", "expected settings by name, found int"),
        ("a.yaml", b"!!python/object/apply:os.getcwd []", "could not determine a constructor"),
        ("a.txt", b"model = 'm'", "give a .toml, .yaml or .json file"),
        ("grpo.py", b"", "or type settings as NAME=VALUE: docs/settings.md lists them"),
        ("config", b"", "give a .toml, .yaml or .json file"),
    ],
)
def test_bad_config_file_is_named_once_with_the_reason(
    tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(SettingsError) as caught:
        read_file(file)
    text = str(caught.value)
    assert text.startswith(f"--config {file}: ") and text.count("--config") == 1
    assert reason in text and "\n" not in text


@pytest.mark.parametrize(
    "content", [b"[rollout]\nseed = 3\n", b"rollout: {seed: 3}\n", b'{"rollout": {"seed": 3}}', b"- 3\n= 3"]
)
def test_pipe_with_a_writer_is_read_as_toml_or_yaml(tmp_path: Path, content: bytes) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(content,))
    writer.start()
    if b"seed" in content:
        assert read_file(pipe) == {"rollout.seed": 3}
    else:
        with pytest.raises(SettingsError, match=r"^--config \S+: (is neither TOML|line 2)"):
            read_file(pipe)
    writer.join()


def test_stream_without_a_suffix_is_told_of_its_mistakes_in_the_language_that_it_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "typed").write_text("rollout: {seed: 3}")
    with (tmp_path / "typed").open() as opened:  # as `--config /dev/stdin < typed` is given it
        assert read_file(Path(f"/dev/fd/{opened.fileno()}")) == {"rollout.seed": 3}
    (tmp_path / "typed").write_text("[rollout]\nseed = three\n")
    with (
        (tmp_path / "typed").open() as opened,
        pytest.raises(SettingsError, match=r"Invalid value \(at line 2"),
    ):
        read_file(Path(f"/dev/fd/{opened.fileno()}"))


@pytest.mark.parametrize("begin", [None, b"", b"[rollout]"])
def test_pipe_to_which_nothing_is_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: bytes | None
) -> None:
    monkeypatch.setattr(settings_file, "SILENT_S", 0.1)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = os.open(pipe, os.O_RDWR)
    os.write(writer, begin or b"")
    if begin is None:
        os.close(writer)
    with pytest.raises(SettingsError, match=r"is a pipe to which nothing was written for 0\.1 s; write the"):
        read_file(pipe)
    if begin is not None:
        os.close(writer)


def test_pipe_of_a_command_that_wrote_nothing_is_refused_at_once() -> None:
    pipe, writer = os.pipe()
    os.close(writer)
    with pytest.raises(SettingsError, match=r"is a pipe that ended without a line; mend the command"):
        read_file(Path(f"/dev/fd/{pipe}"))
    os.close(pipe)


def test_config_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--config .*absent\.toml: No such file or directory"):
        read_file(tmp_path / "absent.toml")
    (tmp_path / "directory.toml").mkdir()
    with pytest.raises(SettingsError, match=r"--config .*directory\.toml: Is a directory"):
        read_file(tmp_path / "directory.toml")


def test_unknown_setting_of_a_file_is_refused_by_its_dotted_name(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("trainer: {learning_rat: 1}\n1: 2\n")
    with pytest.raises(SettingsError, match=r"^--config .*config\.yaml: 2 unknown settings") as caught:
        read_file(file)
    text = str(caught.value)
    assert "\n  trainer.learning_rat: did you mean trainer.learning_rate=1?\n" in text


def test_settings_of_another_trainer_are_all_answered_at_once(tmp_path: Path) -> None:
    file = tmp_path / "verl.yaml"
    file.write_text("data: {train_batch_size: 8, max_response_length: 9}\ncritic: {lr: 1}\nactor: {n: 4}\n")
    with pytest.raises(SettingsError, match=r"^--config .*verl\.yaml: 4 unknown settings") as caught:
        read_file(file)
    text = str(caught.value)
    for theirs, ours in {
        "  data.train_batch_size: ": "rollout.tasks_per_iteration",
        "  data.max_response_length: ": "rollout.max_tokens",
        "  critic.lr: ": "there is no critic",
        "  actor.n: ": "rollout.samples_per_task",
    }.items():
        assert ours in text.partition(theirs)[2].partition("\n")[0]


def test_configuration_of_another_trainer_is_answered_with_a_line_for_each_of_its_names() -> None:
    settings = dict.fromkeys(["lr", "zzz", "beta", *(f"xyzzy.{number}" for number in range(38))], 1)
    with pytest.raises(SettingsError) as caught:
        build(settings)
    lines = str(caught.value).splitlines()
    assert lines[0] == "41 unknown settings; change or remove each of them:"
    assert [line.partition(":")[0] for line in lines[1:3]] == ["  lr", "  beta"]
    assert len(lines) == 5 and "zzz, xyzzy.0, " in lines[3] and lines[3].endswith("xyzzy.37")
    assert lines[4].startswith("  what you leave out gets the defaults here; docs/migration.md")


def test_override_goes_before_the_file_and_both_before_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[rollout]\nseed = 1\nmax_tokens = 5\n")
    settings = build(read_file(file) | dict([parse_override("rollout.seed=2")]))
    assert (settings.rollout.seed, settings.rollout.max_tokens) == (2, 5)
    assert settings.rollout.samples_per_task == RunSettings().rollout.samples_per_task


def test_defaults_of_the_built_in_model_fill_what_is_not_given() -> None:
    flat = dict(flatten(build({"rollout.max_tokens": 64, "iterations": None}).model_dump()))
    assert (flat["rollout.max_tokens"], flat["iterations"]) == (64, None)
    others = TINY_DEFAULTS.keys() - {"rollout.max_tokens", "iterations"}
    assert {key: flat[key] for key in others} == {key: TINY_DEFAULTS[key] for key in others}


def test_defaults_of_the_built_in_model_are_not_those_of_another() -> None:
    assert build({"model": "/models/m"}) == RunSettings(model="/models/m")


def test_every_default_of_the_built_in_model_is_a_setting_that_it_changes() -> None:
    plain = dict(flatten(RunSettings().model_dump()))
    assert all(plain[key] != value for key, value in TINY_DEFAULTS.items())


# ---- published and compared


FULL: dict[str, Any] = {
    "cluster.num_nodes": 3,
    "cluster.rank_weights": "2,1,0.1",
    "rollout.stop": ["\n", "é"],
    "engine.args": {"a.b": {"c": [1, None]}, "seed": 1},
    "engine.url": "http://127.0.0.1:8000",
    "rl_phase": "rollout",
    "rollout_split": "train-only",
    "iterations": 3,
    "trainer.learning_rate": 1.1e-7,
}


@pytest.mark.parametrize("given", [{}, FULL])
def test_settings_survive_publishing_and_reading_back(given: dict[str, Any]) -> None:
    settings = build(given)
    published = RunSettings.published(json.loads(json.dumps(settings.model_dump(mode="json"))))
    assert published == settings
    assert overlay(published, {}) == settings


@pytest.mark.parametrize("given", [{}, FULL])
def test_same_options_on_a_worker_contradict_nothing(given: dict[str, Any]) -> None:
    assert contradictions(build(given), given) == []


def test_bound_of_an_older_run_is_read_and_refused_where_it_is_typed() -> None:
    settings = build({"trainer.clip_low": 0.3}).model_dump(mode="json")
    settings["trainer"]["clip_low"] = 10.0
    published = RunSettings.published(settings)
    assert published.trainer.clip_low == 10 and overlay(published, {"rollout.seed": 3}).rollout.seed == 3
    for typed in ({"trainer.clip_low": 10}, {"trainer.clip_high": 0.3}, {"trainer.sources.a.clip": "dual"}):
        with pytest.raises(SettingsError, match=r"trainer.clip_low=10 with .*or 1 for no bound"):
            overlay(published, typed)
    assert overlay(published, {"trainer.clip_low": 1}).trainer.clip_low == 1


def test_same_value_written_otherwise_contradicts_nothing() -> None:
    rewards = {"rollout.rewards.math": ["math=1", "length=-0.1"]}
    assert contradictions(build(rewards), rewards) == []
    published = build({"cluster.num_nodes": 2, "cluster.rank_weights": [2, 1], "cluster.node_timeout_s": 10})
    typed = {"cluster.num_nodes": "2", "cluster.rank_weights": "2.0,1", "cluster.node_timeout_s": "10"}
    assert contradictions(published, typed) == []


@pytest.mark.parametrize(
    ("key", "value", "option", "here", "there"),
    [
        ("cluster.num_nodes", "2", "--num-nodes", "2", "3"),
        ("cluster.rank_weights", "1,1,1", "--rank-weights", "1,1,1", "2,1,1"),
        ("cluster.rank_weights", "1,1", "--rank-weights", "1,1", "2,1,1"),
        ("model", "/other", "--model", "/other", "builtin:tiny"),
        ("eval_tasks", "eval.jsonl", "--eval-tasks", "eval.jsonl", "not set"),
        ("rl_phase", "update", "--rl-phase", "update", "rollout"),
        ("rollout_split", "eval-only", "--rollout-split", "eval-only", "train-only"),
        ("trainer.learning_rate", 1, "trainer.learning_rate", "1", "0.0003"),
        ("engine.args.seed", 2, "engine.args.seed", "2", "1"),
        ("engine.args.dtype", "half", "engine.args.dtype", "half", "not set"),
    ],
)
def test_contradiction_names_the_option_and_both_values(
    key: str, value: Any, option: str, here: str, there: str
) -> None:
    master = {
        "cluster.num_nodes": 3,
        "cluster.rank_weights": "2,1,1",
        "rl_phase": "rollout",
        "rollout_split": "train-only",
        "engine.args": {"seed": 1},
    }
    expected = f"{option} is {here} here, but the master published {there}"
    assert contradictions(build(master), {key: value}) == [expected]


def test_every_contradiction_is_told() -> None:
    told = contradictions(build({}), {"rollout.seed": 1, "model": "/m", "rollout.top_p": 1.0})
    assert [line.split()[0] for line in told] == ["rollout.seed", "--model"]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("cluster.num_nodes", "x", "--num-nodes=x"),
        ("cluster.rank_weights", "1,x", "--rank-weights 1,x: 'x' is not a number"),
        ("rollot.seed", 1, "unknown setting rollot.seed"),
    ],
)
def test_value_that_no_master_can_have_published_is_refused_as_such(
    key: str, value: Any, expected: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        contradictions(build({}), {key: value})
    assert str(caught.value).startswith(expected)


def test_every_option_is_the_name_of_a_setting() -> None:
    known = dict(flatten(RunSettings().model_dump()))
    assert OPTIONS.keys() <= known.keys()
    assert len(set(map(option_name, OPTIONS))) == len(OPTIONS)


@pytest.mark.parametrize(
    "given",
    [
        {"engine.args.hf-token": "s3cret"},
        {"engine.args.hf_token": "s3cret"},
        {"engine.args.API_KEY": "s3cret"},
        {"engine.args.token": "s3cret"},
        {"engine.args.kv-transfer-config.client-secret": "s3cret"},
        {"engine.args.x": {"deep": {"db-password": "s3cret"}}},
        {"engine.args": {"hf-token": "s3cret"}},
    ],
)
def test_secret_among_the_servers_arguments_is_refused_and_not_told(given: dict[str, Any]) -> None:
    for check in (build, check_each):
        with pytest.raises(SettingsError, match="is a secret: settings are published") as refused:
            check(given)
        assert "s3cret" not in str(refused.value)


def test_arguments_that_only_sound_like_secrets_pass() -> None:
    build({"engine.args": {"max-num-batched-tokens": 8, "ssl-keyfile": "f", "tokenizer": "t", "monkey": 1}})


def test_user_and_password_in_the_url_of_an_engine_are_refused_and_not_told() -> None:
    with pytest.raises(SettingsError, match="leave user and password out") as refused:
        build({"engine.url": "http://me:s3cret@127.0.0.1:8000"})
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"reasoning_end": None}, "without rollout.reasoning_end: nothing says"),
        ({"environment": "calculator"}, "with rollout.environment=calculator: it is for single_turn"),
        ({"segment_tokens": 8}, "with rollout.segment_tokens=8: a sample that is cut"),
        ({"max_tokens": 16}, "with rollout.max_tokens=16: nothing is left for the answer"),
        ({"eval.max_tokens": 16}, "with eval.max_tokens=16: nothing is left for the answer"),
        (
            {"eval.sets.a.tasks": "builtin:arithmetic", "eval.sets.a.max_tokens": 8},
            "with eval.sets.a.max_tokens=8: nothing is left for the answer",
        ),
    ],
)
def test_budget_of_the_reasoning_that_cannot_hold_is_refused(given: dict[str, Any], reason: str) -> None:
    rollout = {"max_tokens": 64, "reasoning_end": "</think>", "thinking_tokens": 16, **given}
    settings = {
        name if "." in name else f"rollout.{name}": value
        for name, value in rollout.items()
        if value is not None
    }
    assert f"rollout.thinking_tokens=16 {reason}" in refused(settings)


@pytest.mark.parametrize(
    "given", [{"rollout.reward": "math"}, {"rollout.environment": "gym:m:C"}], ids=["reward", "environment"]
)
def test_rewards_to_decouple_are_several(given: dict[str, Any]) -> None:
    settings = {"trainer.algorithm": "gdpo", "rollout.reward": "math=1 + length=0.1"}
    build(settings)
    ((name, value),) = given.items()
    assert f"decoupled with {name}={value}: there are not several" in refused({**settings, **given})
    of_a_source = {"trainer.sources.math.algorithm": "gdpo", "rollout.reward": "math=1 + length=0.1"}
    build(of_a_source)
    assert "there are not several" in refused({**of_a_source, **given})
    assert "decoupled with rollout.rewards.a: it standardises each of the same rewards" in refused(
        {**settings, "rollout.rewards.a": "math"}
    )


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ({"iterations": 30}, "give 4 of its 120"),
        ({"iterations": 30, "trainer.passes": 2, "rollout.tasks_per_iteration": 1}, "give 2 of its 60"),
        ({}, "give so many steps of the run"),
    ],
)
def test_share_of_the_steps_for_a_warm_up_is_refused_with_their_number(
    given: dict[str, Any], advice: str
) -> None:
    given = {"model": "m", "tasks": "t.jsonl", "trainer.global_batch_size": 256, **given}
    text = refused({**given, "trainer.warmup_steps": 0.03})
    assert text.startswith("trainer.warmup_steps=0.03 is a share, as TRL's warmup_ratio")
    assert text.endswith(advice) and "\n" not in text
    both = refused({**given, "trainer.warmup_steps": 0.03, "trainer.learning_rate": 0}, lines=3)
    assert "learning_rate" in both and "warmup_steps" in both


def test_source_may_have_dots_in_its_name(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text('[trainer.sources."open.r1"]\nweight = 2\n[trainer.sources.a.b]\nclip = "none"\n')
    typed = {"trainer.sources.open.r1.weight": 2, "trainer.sources.a.b.clip": "none"}
    for overrides in (typed, read_file(config)):
        settings = build({**overrides, "trainer.sources.a.b.weight": 3})
        sources = settings.trainer.sources
        assert sources.keys() == {"open.r1", "a.b"} and sources["open.r1"].weight == 2
        assert sources["a.b"].weight == 3 and sources["a.b"].clip == "none"
        assert contradictions(settings, typed) == [] and overlay(settings, typed) == settings


def test_sources_of_tasks_are_tables_with_names_of_the_user(tmp_path: Path) -> None:
    typed = {"trainer.sources.math.weight": 2, "trainer.sources.code.advantage": "one"}
    config = tmp_path / "c.toml"
    config.write_text('[trainer.sources]\nmath.weight = 2\ncode.advantage = "one"\n')
    for overrides in (typed, read_file(config)):
        trainer = build(overrides).trainer
        assert trainer.sources["math"].weight == 2 and trainer.of_source("code").advantage == "one"
        assert trainer.of_source("other") == build({}).trainer
    assert overlay(build(typed), {"trainer.sources.math.weight": 3}).trainer.sources["math"].weight == 3
    text = refused({"trainer.sources.math.credit": "turn"})
    assert "unknown setting trainer.sources.math.credit; a source has weight, algorithm, advantage" in text
    assert "replaces groups of equal rewards" in refused({**typed, "rollout.dynamic_sampling": True})


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"rollout.teacher": None}, "trainer.kl_to=teacher needs a teacher"),
        ({"trainer.kl": "off"}, "trainer.advantage=zero with trainer.kl=off learns nothing"),
        (
            {"trainer.replay_window": 4},
            "samples of older policies, for whose age trainer.kl_in=loss does not",
        ),
        ({"rollout.environment": "demonstration"}, "trainer.kl=k1 is for samples of the policy"),
        ({"rollout.temperature": 0.5}, "the teacher's logprobs are of temperature 1"),
        (
            {"rollout.teacher": None, "rollout.teachers.math": "http://a:8000/v1"},
            "tasks of other sources need one, too; give rollout.teacher",
        ),
        ({"rollout.teacher": "self"}, "names no field of the tasks for its hint; give self:FIELD"),
        (
            {"rollout.teacher_template": "{prompt}"},
            "has no {hint}; write it where the hint of a task belongs",
        ),
        (
            {"rollout.teacher": "self:a", "rollout.environment": "gym:m:C"},
            "rollout.teacher=self:a: in rollout.environment=gym:m:C no prompt is a task's own",
        ),
        (
            {"rollout.teacher": "self:a", "trainer.algorithm": "sft", "rollout.environment": "demonstration"},
            "rollout.teacher=self:a: in rollout.environment=demonstration no prompt is a task's own",
        ),
    ],
)
def test_distillation_that_would_be_wrong_is_refused(given: dict[str, Any], reason: str) -> None:
    settings = {"rollout.teacher": "http://127.0.0.1:8000/v1", "trainer.algorithm": "distill", **given}
    assert reason in refused({name: value for name, value in settings.items() if value is not None})


def test_labelled_answers_are_refused_where_the_bad_ones_would_be_learnt_or_nothing_is() -> None:
    given = {"rollout__environment": "labelled", "tasks": "tasks.jsonl"}
    assert refusal(trainer__algorithm="sft", **given) == (
        "rollout.environment=labelled with trainer.algorithm=sft would train on the bad answers too; add "
        "trainer.algorithm=kto, or trainer.reward_threshold=1"
    )
    assert "add trainer.algorithm=kto" in refusal(trainer__algorithm="dpo", **given)
    chosen = build({"trainer.algorithm": "kto", "tasks": "tasks.jsonl"}).rollout
    assert (chosen.environment, chosen.samples_per_task) == ("labelled", 1)


def test_section_without_lines_is_nothing_and_one_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("rollout:\n  # seed: 1\ntrainer: {passes: 2}\nengine.url: null\n")
    assert read_file(path) == {"trainer.passes": 2, "engine.url": None}
    path.write_text("rollout: {seed: 1}\ntrainer:\n  passes: 1\nrollout: {max_tokens: 8}\n")
    with pytest.raises(SettingsError, match=r"line 4: rollout is there twice; put them together$"):
        read_file(path)
    path.write_text("trainer: &all\n  passes: 1\n  more: {again: *all}\n")
    with pytest.raises(SettingsError, match=r"line 3: again has itself in it; write it out$"):
        read_file(path)


def test_list_of_files_is_answered_with_a_pattern() -> None:
    with pytest.raises(SettingsError, match=r"^--tasks=a,b: give files as a pattern, e.g. 'data/\*.jsonl'$"):
        build({"tasks": ["a", "b"]})
