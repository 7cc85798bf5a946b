"""What `run` says of itself, loads for that, and does to its process."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from coordinator.console.commands.names import GUEST, LOCAL
from coordinator.console.commands.options import docstrings
from coordinator.console.commands.parse import COMMANDS
from coordinator.settings.loading import OPTIONS
from coordinator.settings.setting_names import known_keys
from coordinator.settings.tree import RunSettings
from tests.coordinator.typed_command import HEAVY, LOADED, REPOSITORY, Run, refusal

NO_DETECTION = "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"
"""typer then takes the name of the shell from the command line."""


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--help"], 0), (["status", "--help"], 0), (["status", "--log-path", "none"], 2)]
)
def test_help_and_status_load_nothing_heavy(run: Run, arguments: list[str], code: int) -> None:
    ended = run(*arguments, command=("-c", LOADED % (HEAVY,)))
    assert ended.stdout.splitlines()[-1] == f"LOADED {code}", ended.stderr


def test_node_loads_no_torch_before_it_takes_part(run: Run) -> None:
    ended = run("--tasks", "broken.jsonl", command=("-c", LOADED % (("torch", "transformers", "vllm"),)))
    assert ended.stdout.splitlines()[-1] == "LOADED 2", ended.stderr


def test_help_names_every_option(run: Run) -> None:
    text = run("--help").stdout
    documented = (
        "--master --worker --num-nodes --rank-weights --log-path --data-path --model --tasks --eval-tasks "
        "--reward --environment --rl-phase --rollout-split --eval-interval --iterations --engine "
        "--engine-url --debug-mode --on-node-failure --node-timeout --rejoin-timeout --expect-gpus "
        "--config --dry-run --version KEY=VALUE"
    )
    assert [option for option in documented.split() if option not in text] == []


def test_help_of_an_option_is_what_its_setting_says(run: Run) -> None:
    text = " ".join(run("--help").stdout.split())
    for option, expected in {
        "cluster.on_node_failure": "--on-node-failure wait|shrink|abort When a node is lost",
        "cluster.node_timeout_s": "--node-timeout SECONDS A node",
        "engine.kind": "--engine auto|vllm|torch What generates. auto: vLLM",
        "tasks": "--tasks FILE The training tasks: a file (JSON lines, .csv",
        "cluster.rank_weights": "--rank-weights N,N,... One positive number",
        "eval.interval": "--eval-interval N Evaluate",
        "model": "builtin:tiny. [default: builtin:tiny]",
    }.items():
        assert expected in text, option
    for key in OPTIONS:
        model, _, name = key.rpartition(".")
        section = RunSettings.model_fields[model].annotation if model else RunSettings
        assert docstrings(section)[name] in text, key  # pyright: ignore[reportArgumentType]


def test_help_names_no_empty_default(run: Run) -> None:
    assert not re.search(r"default:\s*\]", run("--help").stdout)


def test_help_lists_the_commands_a_line_each_within_80_columns(run: Run) -> None:
    text = run("--help", env={"COLUMNS": "80"}).stdout
    assert max(map(len, text.splitlines())) <= 80
    listed = re.findall(r"^  run ([\w-]+) +\w", text[: text.index("Options:")], re.MULTILINE)
    assert sorted(listed) == sorted([LOCAL, GUEST, *COMMANDS])


@pytest.mark.parametrize("name", ["", LOCAL, GUEST, *COMMANDS])
def test_usage_of_a_command_is_its_own(run: Run, name: str) -> None:
    ended = run(*name.split(), "--help")
    assert ended.stdout.startswith(f"Usage: run {name}".rstrip() + " [OPTIONS]"), ended.stderr


COMPLETED = [
    ("run ", {LOCAL, GUEST, *COMMANDS}),
    ("run sta", {"status"}),
    ("run status --j", {"--json"}),
    ("run local --iter", {"--iterations"}),
    ("run --num-nodes 2 --rank-w", {"--rank-weights"}),
    ("run --rl-phase ", {"both", "rollout", "update"}),
    ("run trainer.le", {"trainer.learning_rate="}),
    ("run local trainer.le", {"trainer.learning_rate="}),
    ("flagpost sta", {"status"}),
]


@pytest.mark.parametrize(("typed", "expected"), COMPLETED, ids=[typed for typed, _ in COMPLETED])
def test_tab_completes_commands_options_and_settings_and_loads_nothing_heavy(
    run: Run, typed: str, expected: set[str]
) -> None:
    program, *words = typed.split(" ")
    asked = {
        f"_{program.upper()}_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(words)),
    }
    called = LOADED.replace("import sys", f"import sys; sys.argv[0] = '/bin/{program}'", 1)
    ended = run(command=("-c", called % ((*HEAVY, "rich"),)), env=asked)
    *found, loaded = ended.stdout.splitlines()
    assert (set(found), loaded) == (expected, "LOADED 0"), ended.stderr


def test_completion_is_installed_for_the_name_that_was_typed(run: Run, place: Path) -> None:
    words = "import sys; from coordinator.cli import main; sys.argv[0] = '/bin/flagpost'; sys.exit(main())"
    script = run("--show-completion", "bash", command=("-c", words), env={NO_DETECTION: "1"}).stdout
    assert "_FLAGPOST_COMPLETE=complete_bash" in script and script.rstrip().endswith("flagpost")
    assert run("--install-completion", "bash", env={NO_DETECTION: "1"}).returncode == 0
    assert "_RUN_COMPLETE" in (place / "home" / ".bash_completions" / "run.sh").read_text()


def test_both_names_of_the_command_are_the_same(run: Run, place: Path) -> None:
    scripts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"run": "flagpost_command:main", "flagpost": "flagpost_command:main"}
    words = "import sys; from coordinator.cli import main; sys.argv[0] = '/bin/flagpost'; sys.exit(main())"
    as_flagpost = ("-c", words)
    assert run("--help", command=as_flagpost).stdout == run("--help").stdout
    assert "--rl-phase=all" in refusal(run, place, "--rl-phase", "all", command=as_flagpost)


@pytest.mark.parametrize(("umask", "result"), [(0o022, 0o027), (0o722, 0o027), (0o777, 0o077)])
def test_owner_may_do_all_and_others_nothing_whatever_the_umask_is(run: Run, umask: int, result: int) -> None:
    script = "import os; from coordinator.cli import main; main(); print(os.umask(0))"
    ended = run("--version", command=("-c", script), umask=umask)
    assert ended.stdout.splitlines()[-1] == str(result)


def test_signals_are_heard_and_exit_codes_of_children_are_true_whatever_started_the_command(run: Run) -> None:
    script = (
        "import signal as s; s.signal(s.SIGCHLD, s.SIG_IGN)\n"
        "s.pthread_sigmask(s.SIG_BLOCK, s.valid_signals())\n"
        "from coordinator.cli import main; main(); print(s.pthread_sigmask(s.SIG_BLOCK, []))\n"
        "import subprocess; print(subprocess.call(['false']))"
    )
    ended = run("--version", command=("-c", script))
    assert ended.stdout.splitlines()[1:] == ["set()", "1"], ended.stderr


@pytest.mark.parametrize(("words", "code"), [("--version", 0), ("--no-such-option", 2)])
def test_exit_code_is_true_where_python_is_told_to_inspect(run: Run, words: str, code: int) -> None:
    ended = run(words, env={"PYTHONINSPECT": "1"}, stdin=subprocess.DEVNULL)
    assert ended.returncode == code and "Traceback" not in ended.stderr, ended


def test_version_is_printed(run: Run) -> None:
    ended = run("--version")
    assert (ended.returncode, ended.stdout.split()[0]) == (0, "flagpost")


@pytest.mark.parametrize(
    ("typed", "same"),
    [
        (["help"], ["--help"]),
        (["iterations=4", "--help"], ["--help"]),
        (["help", "status"], ["status", "--help"]),
        (["--help", "status"], ["status", "--help"]),
        (["help", "trainer.lora"], ["trainer.lora", "--help"]),
        (["--help", "lr"], ["trainer.learning_rate", "--help"]),
    ],
)
def test_help_is_found_wherever_the_word_stands(run: Run, typed: list[str], same: list[str]) -> None:
    ended = run(*typed)
    assert ended.returncode == 0 and ended.stdout and ended.stdout == run(*same).stdout


def test_help_of_a_section_has_each_of_its_settings_with_default_and_text(run: Run) -> None:
    lines = run("help", "trainer.lora").stdout.splitlines()
    text = "    Rank of the adapters, e.g. 16; 0: all weights are trained."
    assert lines[:2] == ["trainer.lora.rank=0", text]
    assert [line.partition("=")[0] for line in lines if not line.startswith(" ")] == [
        key for key in known_keys() if key.startswith("trainer.lora.")
    ]
