"""The command `run` as people and schedulers start it: what it prints, its exit code, what it writes."""

import ctypes
import json
import os
import re
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.console.commands.names import GUEST, LOCAL
from coordinator.console.commands.options import docstrings
from coordinator.console.commands.parse import COMMANDS
from coordinator.directory.file_names import Beat
from coordinator.directory.layout import FORMAT, RunDir
from coordinator.protocol.records import Given, claim
from coordinator.settings.loading import OPTIONS, build, flatten
from coordinator.settings.tree import RunSettings
from coordinator.start.rank import NODES_VARIABLE, RANK_VARIABLES
from rollout.storage import files
from tests.commands import run_forked
from tests.coordinator.examples import record, run_dir_at, tree, write_json
from tests.models import write_model

REPOSITORY = Path(__file__).parents[2]
SCHEDULERS = {*RANK_VARIABLES, NODES_VARIABLE, "MASTER_ADDR", "RUN_LOG_PATH"}
HEAVY = ("torch", "transformers", "vllm", "aiohttp", "jinja2", "pynvml")

LOADED = """
import sys
from coordinator.cli import main
try:
    code = main()
except SystemExit as end:
    code = end.code
print("LOADED", code, *(name for name in %r if name in sys.modules))
"""

NO_DETECTION = "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"
"""typer then takes the name of the shell from the command line."""

CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, PR_CAPBSET_DROP = 1, 2, 24


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A working directory with task files, models and configurations, good and bad."""
    (tmp_path / "home").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "good.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n')
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "broken.jsonl").write_text('{"prompt": "1+2="}\n{"prompt": \n')
    (tmp_path / "both.jsonl").write_text('{"prompt": "1", "messages": []}\n')
    (tmp_path / "no_answer.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n\n{"prompt": "2+2="}\n')
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "?"}], "answer": "3"}\n')
    (tmp_path / "users.py").write_text(
        "def score(completion): return 1\ndef play(task, policy, sampling): return []\n"
    )
    write_model(tmp_path / "small", {"max_position_embeddings": 64}, tokenizer={})
    (tmp_path / "bad.toml").write_text("[trainer\n")
    (tmp_path / "a file").touch()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "run.json").write_text("{}")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path


COMMAND = ("-m", "coordinator.cli")
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(place: Path) -> Run:
    """Runs `run` there, to its end."""

    def run_once(
        *arguments: str, command: tuple[str, ...] = COMMAND, **more: Any
    ) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if name not in SCHEDULERS}
        environment |= {"PYTHONPATH": str(REPOSITORY), "HOME": str(place / "home"), "COLUMNS": "110"}
        environment |= {"PYTHONDONTWRITEBYTECODE": "1"}  # the user's module lies in the working directory
        # What a machine remembers of large files is not written into the working directory.
        environment |= {"XDG_CACHE_HOME": f"{place}-cache"} | more.pop("env", {})
        if command == COMMAND and not more:
            return run_forked(arguments, place, environment)
        return subprocess.run(
            [sys.executable, *command, *arguments],
            cwd=place,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            **more,
        )

    return run_once


def refusal(run: Run, place: Path, *arguments: str, **more: Any) -> str:
    """The one line with which `run` refuses; it has written nothing."""
    before = tree(place)
    ended = run(*arguments, **more)
    assert (ended.returncode, ended.stdout) == (2, ""), ended
    assert tree(place) == before
    assert ended.stderr.startswith("run: ") and ended.stderr.count("\n") == 1, ended.stderr
    return ended.stderr.removeprefix("run: ").rstrip("\n")


# ---- what it says


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
        "engine.kind": "--engine auto|vllm|torch auto",
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


def test_dry_run_prints_the_settings_and_writes_nothing(run: Run, place: Path) -> None:
    (place / "config.toml").write_text("[rollout]\nseed = 3\nmax_tokens = 5\n")
    before = tree(place)
    ended = run(
        *("--master", "--num-nodes", "3", "--rank-weights", "2,1,1", "--config", "config.toml", "--dry-run"),
        *("rollout.seed=4", "--reward", "numeric", "trainer.learning_rate=1e-6"),
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert tree(place) == before
    expected = build(
        {
            "cluster.num_nodes": 3,
            "cluster.rank_weights": [2, 1, 1],
            "rollout.seed": 4,
            "rollout.max_tokens": 5,
            "rollout.reward": "numeric",
            "trainer.learning_rate": 1e-6,
        }
    )
    assert json.loads(ended.stdout) == expected.model_dump(mode="json")


def test_columns_of_data_are_mapped_alike_on_the_command_line_and_in_a_file(run: Run, place: Path) -> None:
    (place / "made.csv").write_text("question,final\n1+2=,3\n")
    (place / "made.toml").write_text('tasks = "made.csv"\n[columns]\nprompt = "question"\nanswer = "final"\n')
    typed = ["--tasks", "made.csv", "columns.prompt=question", "columns.answer=final"]
    shown = [run(*words, "--dry-run").stdout for words in (typed, ["--config", "made.toml"])]
    assert shown[0] == shown[1]
    assert json.loads(shown[0])["columns"] == {"prompt": "question", "answer": "final"}
    said = refusal(run, place, "--log-path", "none", "--tasks", "made.csv", "columns.prompt=text")
    problem = "nothing in the column 'text' (columns.prompt); there is question, final"
    assert said == f"{place}/made.csv, row 1: {problem}"
    said = refusal(run, place, "--log-path", "none", "columns.prompt=question")
    assert "columns.prompt names a column of data, but --tasks is builtin:arithmetic" in said
    said = refusal(run, place, "--log-path", "none", *typed, "eval.columns.prompt=question")
    assert "eval.columns.prompt names a column of data, but --eval-tasks is not given" in said


def test_option_of_the_reward_may_come_several_times(run: Run) -> None:
    typed = ["--reward", "exact=1", "--reward", "length=-0.1"]
    several, together = run(*typed, "--dry-run"), run("rollout.reward=exact=1 + length=-0.1", "--dry-run")
    assert json.loads(several.stdout)["rollout"]["reward"] == "exact=1 + length=-0.1"
    assert several.stdout == together.stdout
    wrong = run("--reward", "exact=1", "--reward", "length=much")
    assert wrong.returncode == 2 and "the weight 'much' of length is no finite number" in wrong.stderr


def test_dry_run_looks_at_what_the_settings_name_and_fetches_nothing(run: Run, place: Path) -> None:
    (place / "bad.jsonl").write_text('{"prompt": "1+2="}\n')
    for words, reason in (
        (["--reward", "nosuch"], "reward 'nosuch': there is exact"),
        (["--tasks", "nosuch.jsonl"], "nosuch.jsonl: no such file"),
        (["--tasks", "bad.jsonl"], "--reward exact cannot score this task"),
        (["--model", "./nosuch"], "--model ./nosuch: no such directory"),
        (["--tasks", "hf:"], "hf:: write hf:NAME, hf:NAME:SPLIT or"),
        (["--model", "./empty", "eval.interval=0"], "/empty/config.json: is missing; give"),
    ):
        ended = run(*words, "--dry-run")
        assert ended.returncode == 2 and reason in ended.stderr and json.loads(ended.stdout), ended
        assert run(*words, "--settings-only").returncode == 0
    ended = run("--model", "nobody/no-such-model", "--dry-run")
    assert ended.returncode == 0 and "a start would fetch it: nobody/no-such-model" in ended.stderr
    assert run("--worker", "1", "--tasks", "nosuch.jsonl", "--dry-run").returncode == 0
    ended = run("trainer.kl_coefficient=0.1", "--dry-run")
    assert ended.returncode == 0 and "does nothing with trainer.kl=off" in ended.stderr


def test_dry_run_of_all_nodes_prints_the_same(run: Run) -> None:
    ended = run("local", "--num-nodes", "3", "--dry-run")
    assert json.loads(ended.stdout) == build({"cluster.num_nodes": 3}).model_dump(mode="json")


def test_debug_mode_is_the_server_on_the_default_port(run: Run) -> None:
    settings = dict(flatten(json.loads(run("--debug-mode", "--dry-run").stdout)))
    assert settings["engine.url"] == "http://127.0.0.1:8000"
    other = ("--engine-url", "http://127.0.0.1:8001")
    settings = dict(flatten(json.loads(run(*other, "--debug-mode", "--dry-run").stdout)))
    assert settings["engine.url"] == other[1]


def test_scheduler_says_rank_and_number_of_nodes(run: Run) -> None:
    slurm = {"SLURM_NNODES": "4", "SLURM_NODEID": "0"}
    assert json.loads(run("--dry-run", env=slurm).stdout)["cluster"]["num_nodes"] == 4
    ended = run("--dry-run", "--num-nodes", "2", env=slurm)
    assert json.loads(ended.stdout)["cluster"]["num_nodes"] == 2


def test_master_addr_that_names_this_machine_makes_the_master(run: Run) -> None:
    assert run("--num-nodes", "2", "--dry-run", env={"MASTER_ADDR": "localhost"}).returncode == 0


# ---- bad input


BAD = [
    ("--master --num-nodes 3 --rank-weights 2,1", "--rank-weights 2,1 has 2 weights for --num-nodes 3"),
    ("--master --num-nodes 2 --rank-weights 1,0", "--rank-weights 1,0: '0' is not positive"),
    ("--master --num-nodes 2 --rank-weights 1,-1", "--rank-weights 1,-1: '-1' is not positive"),
    ("--master --num-nodes 2 --rank-weights 1,x", "--rank-weights 1,x: 'x' is not a number"),
    ("--master --num-nodes 0", "--num-nodes=0: input should be greater"),
    ("--worker 0", "--worker 0: rank 0 is the master"),
    ("--worker -1", "--worker -1: outside the range"),
    ("--worker x", "--worker x: not a rank"),
    ("--worker", "--worker: give the rank of this machine, e.g. --worker 1"),
    ("--worker --num-nodes 3", "--worker --num-nodes: give the rank of this machine, e.g. --worker 1 --num"),
    ("--worker 3 --num-nodes 3", "--worker 3 is outside --num-nodes 3 (workers are 1 to 2)"),
    ("--worker 1 --num-nodes x", "--num-nodes=x: input should be a valid integer"),
    ("--worker 1 rollot.seed=1", "unknown setting rollot.seed; did you mean rollout.seed?"),
    ("--master --worker 1", "--master and --worker 1 exclude each other"),
    (
        "--worker 1 --accept-code-change",
        "--accept-code-change is for the master; leave it out beside --worker 1",
    ),
    ("--num-nodes 3", "this node has no role in a run of 3 nodes"),
    ("rollout.tasks_per_iter=8", "unknown setting rollout.tasks_per_iter; did you mean"),
    ("trainer.learning_rate=fast", "trainer.learning_rate=fast: input should be a valid number"),
    ("trainer.learning_rate=Infinity", "trainer.learning_rate=inf: input should be a finite number"),
    ("stats", "'stats' is neither a command, nor an option, nor KEY=VALUE; did you mean run status?"),
    ("local stats", "did you mean run status?"),
    ("trian", "did you mean run local?"),
    ("--worker 1 --worker 2", "--worker is there 2 times; give it once"),
    ("--config a.toml --config=b.toml", "--config is there 2 times; give it once"),
    ("samples 99", "did you mean --iteration 99?"),
    ("guets", "did you mean run guest?"),
    ("fork --from a --to b", "No such option: --from; did you mean --log-path?"),
    ("serve --log-path x", "did you mean --root?"),
    ("guest --worker 1", "No such option: --worker; this command takes no rank; leave it out"),
    ("doctor --num-nodes 3", "did you mean --peers?"),
    ("help", "did you mean run --help?"),
    ("metrics", "did you mean run report?"),
    ("worker 1", "did you mean run --worker RANK?"),
    (
        "--num-nodes 2 status",
        "'status' is neither a command, nor an option, nor KEY=VALUE; a command comes first",
    ),
    ("trainer.lr", "did you mean trainer.learning_rate=VALUE?"),
    ("iterations", "did you mean --iterations?"),
    ("good.jsonl", "nor KEY=VALUE; a file is given as --tasks good.jsonl"),
    ("xyzzy", "nor KEY=VALUE; e.g. trainer.learning_rate=1e-6"),
    ("trainer=3", "unknown setting trainer; did you mean a setting in it: trainer.algorithm, "),
    ("lr=1e-6", "unknown setting lr; did you mean trainer.learning_rate?"),
    ("--learning-rate 1", "No such option: --learning-rate; did you mean trainer.learning_rate=VALUE?"),
    ("--batch-size=4", "No such option: --batch-size; did you mean trainer.global_batch_size=VALUE?"),
    ("--iteration 3", "No such option: --iteration; did you mean --iterations?; see run --help"),
    ("local --lr 3", "did you mean trainer.learning_rate=VALUE?; see run local --help"),
    ("trainer.betas=0.9", "trainer.betas=0.9: give a list, e.g. 'trainer.betas=[0.9,0.95]'"),
    ("trainer.betas=[0.9]", "trainer.betas=0.9: give a list, e.g. 'trainer.betas=[0.9,0.95]'"),
    ("rollout.stop=[a,b]", """rollout.stop=[a,b]: give a list, e.g. 'rollout.stop=["a","b"]'"""),
    ("-h", "No such option: -h; did you mean --help?"),
    ("version", "did you mean run --version?"),
    ("--tasks=", "--tasks is empty (a variable that is not set?); give a value"),
    ("--tasks good.jsonl,chat.jsonl", "no such file (give several files as a pattern, e.g. 'data/*.jsonl')"),
    ("config=bad.toml", "unknown setting config; a file of settings is given as --config FILE"),
    ("--config empty", "Is a directory; give a .toml or .yaml file"),
    ("--dry-run --reward exact numeric", "nor KEY=VALUE; give each for itself: --reward exact --reward num"),
    ("launch --hosts a b", "'b' is no option; write commas without spaces: --hosts a,b"),
    ("rollout.stop=5", """rollout.stop=5: give a list, e.g. 'rollout.stop=["5"]'"""),
    ("rollout.stop=abc", """rollout.stop=abc: give a list, e.g. 'rollout.stop=["abc"]'"""),
    (
        "--tasks gsm8k",
        "gsm8k: no such file (a data set of Hugging Face: hf:NAME); give a file of JSON lines, CSV",
    ),
    ("--worker 1 --reset-settings", "--reset-settings is for the master; leave it out beside --worker 1"),
    ("--reset-settings trainr", "unknown setting trainr; did you mean trainer?"),
    ("--reset-settings lr=3", "unknown setting lr; did you mean trainer.learning_rate?"),
    ("--nodes 3", "No such option: --nodes; did you mean --num-nodes?"),
    ("--num-nodes", "Option '--num-nodes' requires an argument"),
    ("--tasks absent.jsonl", "absent.jsonl: no such file"),
    ("--tasks god.jsonl", "did you mean good.jsonl?; give a file of JSON lines"),
    ("--model ./smal", "--model ./smal: no such directory (there is no smal); did you mean small?"),
    ("--tasks broken.jsonl", "broken.jsonl:2: not JSON"),
    ("--tasks both.jsonl", "both.jsonl:1: give either `prompt` or `messages`"),
    ("--tasks empty.jsonl", "empty.jsonl: holds no task"),
    ("--tasks builtin:chess", "builtin:chess: no such built-in task set"),
    ("--tasks good.jsonl --eval-tasks broken.jsonl", "broken.jsonl:2: not JSON"),
    ("--model empty", "/empty/config.json: is missing; give the directory of a model"),
    ("--model model", "/model: holds no model.safetensors and no model.safetensors.index.json"),
    ("--model ./absent", "--model ./absent: no such directory"),
    ("--data-path absent", "--data-path absent: no such directory"),
    ("--reward best", "--reward best: "),
    (
        "--reward users:score",
        "--reward users:score: it takes (completion), but is called with (task, completion)",
    ),
    ("--environment users:play", "--environment users:play: it is not async; write `async def`"),
    ("--tasks no_answer.jsonl", "no_answer.jsonl:3: --reward exact cannot score this task"),
    ("--tasks good.jsonl --eval-interval 2", "--eval-interval 2 needs tasks to evaluate on"),
    ("--tasks chat.jsonl --model small", "chat.jsonl:1: this task has `messages`, but --model"),
    ("rollout.max_tokens=2000", "rollout.max_tokens=2000 leaves no room for a prompt"),
    ("local --model small rollout.max_tokens=64", "rollout.max_tokens=64 leaves no room for a prompt"),
    ("--engine-url http://127.0.0.1:9", "--engine-url http://127.0.0.1:9: no engine answers there"),
    ("--log-path /nowhere/run", "--log-path /nowhere/run: there is no directory /nowhere"),
    ("--environment none:at_all", "--environment none:at_all: "),
    ("--engine vllm engine.args.port=8000", "engine.args.port: the server listens on a Unix socket"),
    ("--rl-phase all", "--rl-phase=all: input should be"),
    ("--rollout-split train-only --rl-phase update", "--rollout-split train-only needs a rollout"),
    ("--rollout-split eval-only", "--rollout-split eval-only makes nothing to train on"),
    ("--config bad.toml", "--config bad.toml: "),
    ("--config absent.toml", "--config absent.toml: No such file or directory"),
    ("status --log-path empty", "no run there"),
    ("status --log-path good.jsonl", "no run there"),
    ("status --jsn", "No such option: --jsn; did you mean --json?; see run status --help"),
    ("status runs/exp1", "(runs/exp1); a run directory is given as --log-path runs/exp1; see run status"),
    ("logs runs/exp1", "give the number of a rank, e.g. run logs 1, and the run directory as --log-path"),
    ("diff a b c", "extra argument(s) (c); leave it out; see run diff"),
    (
        "fork --iteration 2 --to x trainer.lr=1",
        "(trainer.lr=1); this command takes no settings; give them where",
    ),
    ("eval --tasks x", "No such option: --tasks; did you mean --eval-tasks?; see run eval --help"),
    ("logs --node 1", "No such option: --node; see run logs --help"),
    ("status --dir x", "No such option: --dir; did you mean --log-path?"),
    ("serve --dir x", "No such option: --dir; did you mean --root?"),
    ("plan --model m --tasks x", "No such option: --tasks; did you mean tasks=VALUE?; see run plan --help"),
    ("plan --model m rollout.reward=nosuch", "--reward nosuch: reward 'nosuch': there is exact"),
    ("diff a", "B is missing: the run directory to compare it with; see run diff --help"),
    (
        "--worker 1 --log-path /proc/x",
        "--log-path /proc/x: /proc shows the kernel, and keeps no files; give a",
    ),
    ("--model builtin:tinny", "--model builtin:tinny: the built-in model is builtin:tiny"),
    ("--model old", "old: is of a run, and no model; it has no checkpoint yet"),
    ("eval --checkpoint old --eval-tasks good.jsonl", "is of a run, and no model; it has no check"),
    ("serve --root good.jsonl", "--root /"),
    ("stop --log-path runs/exp1", "for the jobs of a server (run serve); Ctrl+C ends a run, where its"),
    ("resume runs/exp1", "give the name of a job; the command that started a run, typed again, resumes it"),
    ("rescore --iteration 1 --reward exact --to x --dry-run", "--to x beside --dry-run: a dry run makes"),
    ("--model ./good.jsonl", "good.jsonl: is a file; give the directory of a model, with its"),
    ("--environment calculater", "did you mean calculator? There is single_turn, "),
    ("--log-path /proc/x", "--log-path /proc/x: /proc shows the kernel, and keeps no files; give a"),
    ("export", "-o DIR is missing: a new directory for the model; see run export --help"),
    ("cleanup", "--iteration N is missing: the interrupted iteration; see run cleanup --help"),
    ("fork --iteration 2 --log-path empty --to new", "no run there (no run.json)"),
    ("verify --log-path empty", "no run there"),
    ("cleanup --iteration x", "--iteration x: give the number of an iteration"),
    ("local --master", "run local starts all nodes of this machine"),
    ("local --num-nodes 2 --rank-weights 1", "--rank-weights 1 has 1 weights for --num-nodes 2"),
    ("local --tasks broken.jsonl", "broken.jsonl:2: not JSON"),
]


@pytest.mark.parametrize(("arguments", "expected"), BAD, ids=[arguments for arguments, _ in BAD])
def test_bad_input_is_refused_in_one_line_and_nothing_is_written(
    run: Run, place: Path, arguments: str, expected: str
) -> None:
    assert expected in refusal(run, place, *arguments.split())


@pytest.mark.parametrize("role", [["--master"], ["--worker", "1"], ["local"]])
@pytest.mark.parametrize("path", ["a file", "a file/below"])
def test_log_path_that_is_a_file_is_refused(run: Run, place: Path, role: list[str], path: str) -> None:
    text = refusal(run, place, *role, "--log-path", path)
    assert text == f"--log-path {place / path}: {place / 'a file'} is a file; give a directory"


def test_log_path_through_a_link_to_nothing_names_the_link(run: Run, place: Path) -> None:
    (place / "shared").symlink_to("/nowhere")
    text = f"{place / 'shared'} is a link to /nowhere, which is not there; is it mounted here?"
    assert (
        refusal(run, place, "--master", "--log-path", "shared/run")
        == f"--log-path {place}/shared/run: {text}"
    )


def lose_privileges() -> None:
    """Let the permissions of files hold for root too, in a child that is about to start."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "cannot drop a capability")


@pytest.mark.parametrize("path", ["locked", "locked/run", "sealed/run"])
def test_log_path_that_is_not_writable_is_refused(run: Run, place: Path, path: str) -> None:
    for name, mode in (("locked", 0o555), ("sealed", 0o000)):
        (place / name).mkdir()
        (place / name).chmod(mode)
    text = refusal(run, place, "--log-path", path, preexec_fn=lose_privileges if os.geteuid() == 0 else None)
    assert text == f"--log-path {place / path}: {place / path.split('/')[0]} is not writable for this user"


def test_log_path_comes_from_the_environment(run: Run, place: Path) -> None:
    text = refusal(run, place, "status", env={"RUN_LOG_PATH": "elsewhere"})
    assert f"--log-path {place / 'elsewhere'}" in text


@pytest.mark.parametrize("role", [["--master"], ["--worker", "1", "--rejoin-timeout", "20"]])
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"run_id": "abc", "format": FORMAT + 1}, f"holds a run of format {FORMAT + 1}"),
        ([], "holds a run of format None"),
    ],
)
def test_run_of_another_format_is_refused(
    run: Run, place: Path, role: list[str], content: Any, expected: str
) -> None:
    run_dir = run_dir_at(place / "run")
    write_json(run_dir.run_json, content)
    before = tree(place)
    ended = run(*role, "--log-path", "run")
    assert ended.returncode == 2 and tree(place) == before
    assert expected in ended.stderr.splitlines()[-1] and "Traceback" not in ended.stderr


def test_damaged_run_json_is_refused(run: Run, place: Path) -> None:
    run_dir_at(place / "run").run_json.write_text('{"run')
    assert "run.json is damaged" in refusal(run, place, "--log-path", "run")


FIXED = {
    "model": {"name": "builtin:tiny", "digest": "builtin:tiny, tiny.warmup_steps=800"},
    "tasks": {"name": "builtin:arithmetic", "digest": "0" * 64},
    "rollout.seed": {"name": "0", "digest": "0"},
}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            "tiny.warmup_steps=1",
            "--model is builtin:tiny, tiny.warmup_steps=1, but this run was started with",
        ),
        ("--tasks good.jsonl", "good.jsonl, but this run was started with builtin:arithmetic"),
        ("--tasks good.jsonl --eval-interval 2", "good.jsonl, but this run was started with builtin:"),
        ("rollout.seed=7", "was started with"),
    ],
)
def test_what_may_not_change_between_starts_is_refused(
    run: Run, place: Path, arguments: str, expected: str
) -> None:
    run_dir = run_dir_at(place / "run")
    write_json(run_dir.run_json, {"run_id": "abc", "format": FORMAT, "fixed": FIXED})
    text = refusal(run, place, "--log-path", "run", *arguments.split())
    assert expected in text and text.endswith("to start anew, use another log path")


LAST = {"cluster.num_nodes": 3, "cluster.rank_weights": "2,1,1", "rollout.max_tokens": 64, "iterations": 5}


@pytest.fixture
def begun(place: Path) -> RunDir:
    """A run that was started with LAST, and stopped."""
    run_dir = run_dir_at(place / "run")
    write_json(run_dir.run_json, {"run_id": "abc", "format": FORMAT, "fixed": FIXED})
    last = record(1, "lobby", {}, settings=build(LAST))
    given = Given(host=socket.gethostname(), settings=LAST)
    assert claim(run_dir, last.model_copy(update={"given": given}))
    return run_dir


@pytest.mark.parametrize(
    ("arguments", "changed", "said"),
    [
        ("--master", {}, []),
        ("local", {}, []),
        (
            "--master --num-nodes 2",
            {"cluster.num_nodes": 2, "cluster.rank_weights": None},
            [
                "--num-nodes is 2, at the last start it was 3",
                "--rank-weights is not set, at the last start it was 2,1,1",
            ],
        ),
        (
            "local --config given.toml --reset-settings iterations",
            {"rollout.temperature": 0.5, "iterations": 16},
            [
                "--iterations is 16, at the last start it was 5",
                "rollout.temperature is 0.5, at the last start it was 1",
            ],
        ),
    ],
)
def test_dry_run_shows_what_a_start_would_go_by_and_what_it_changes(
    run: Run, place: Path, begun: RunDir, arguments: str, changed: dict[str, Any], said: list[str]
) -> None:
    (place / "given.toml").write_text("[rollout]\ntemperature = 0.5\n")
    ended = run(*arguments.split(), "--log-path", "run", "--dry-run")
    assert ended.stderr.splitlines() == said
    assert json.loads(ended.stdout) == build({**LAST, **changed}).model_dump(mode="json")


@pytest.mark.parametrize("words", [["--reset-settings"], ["--reset-settings", "rollout.seed=0"]])
def test_reset_without_a_name_is_of_all_settings(run: Run, begun: RunDir, words: list[str]) -> None:
    ended = run("--dry-run", "--log-path", "run", *words)
    assert json.loads(ended.stdout) == build({}).model_dump(mode="json"), ended.stderr
    assert "--num-nodes is 1, at the last start it was 3" in ended.stderr.splitlines()


def test_start_without_a_role_in_a_run_of_several_nodes_is_refused(
    run: Run, place: Path, begun: RunDir
) -> None:
    assert "this node has no role in a run of 3 nodes" in refusal(run, place, "--log-path", "run")


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_run_directory_that_every_user_can_write_is_refused_unless_it_is_allowed(
    run: Run, place: Path, mode: int
) -> None:
    (place / "open").mkdir()
    (place / "open").chmod(mode)
    text = refusal(run, place, "--log-path", "open")
    assert f"(mode {mode:04o})" in text and "add --allow-shared-dir" in text
    text = refusal(run, place, "--log-path", "open", "--allow-shared-dir", "--tasks", "broken.jsonl")
    assert "broken.jsonl" in text


# ---- a worker and what its master published


@pytest.fixture
def reward() -> str:
    """The reward that the master has published."""
    return "exact"


@pytest.fixture
def master(place: Path, reward: str) -> Iterator[RunDir]:
    """A run whose master beats, with three nodes of weights 2,1,1."""
    run_dir = run_dir_at(place / "run")
    write_json(run_dir.run_json, {"run_id": "abc", "format": FORMAT, "fixed": FIXED})
    cluster = {"cluster.num_nodes": 3, "cluster.rank_weights": "2,1,1", "cluster.rejoin_timeout_s": 30}
    settings = build({**cluster, "rollout.reward": reward})
    assert claim(run_dir, record(1, "lobby", {}, settings=settings))
    over = threading.Event()

    def beat() -> None:
        counter = 0
        while not over.wait(0.05):
            counter += 1
            path = run_dir.entry(Beat(1, 0, 1, counter))
            files.publish(path, b"{}", durable=False)
            if counter > 1:
                files.remove(run_dir.entry(Beat(1, 0, 1, counter - 1)))

    beating = threading.Thread(target=beat)
    beating.start()
    yield run_dir
    over.set()
    beating.join(timeout=60)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--worker 1 --num-nodes 2", "--num-nodes is 2 here, but the master published 3"),
        ("--worker 1 --rank-weights 1,1,1", "--rank-weights is 1,1,1 here, but the master published 2,1,1"),
        ("--worker 1 --tasks good.jsonl", "good.jsonl here, but the master published builtin:"),
        ("--worker 1 rollout.seed=9", "rollout.seed is 9 here, but the master published 0"),
        ("--worker 3", "--worker 3 is outside the master's --num-nodes 3 (workers are 1 to 2)"),
    ],
)
def test_worker_that_contradicts_its_master_is_refused_and_writes_nothing(
    run: Run, master: RunDir, arguments: str, expected: str
) -> None:
    def without_beats() -> set[str]:
        return {path for path in tree(master.root) if ".b0" not in path}

    before = without_beats()
    ended = run("--log-path", "run", "--rejoin-timeout", "30", *arguments.split())
    assert ended.returncode == 2, ended.stderr
    assert expected in ended.stderr.splitlines()[-1]
    assert without_beats() == before


@pytest.mark.parametrize("reward", ["of_the_master:score"])
def test_worker_that_cannot_import_the_masters_reward_says_so_before_it_joins(
    run: Run, place: Path, master: RunDir
) -> None:
    ended = run("--worker", "1", "--log-path", "run", "--rejoin-timeout", "30")
    assert ended.returncode == 2, ended.stderr
    said = ended.stderr.splitlines()[-1]
    assert said.startswith("run: --reward of_the_master:score: module 'of_the_master' cannot be ")
    assert f"looked for in {place}, on PYTHONPATH" in said
    assert "n1.b" not in "".join(tree(master.workers))


def test_log_path_may_name_a_directory_that_is_not_there_on_its_way(run: Run, place: Path) -> None:
    """Else each call on it would be tried again and again, as on a mount that hides a name."""
    done = run("status", "--log-path", "absent/../exp1")
    assert f"{place.resolve() / 'exp1'}" in done.stdout + done.stderr
    assert ".." not in done.stdout + done.stderr


def test_home_is_found_where_no_shell_expands_it(run: Run, place: Path) -> None:
    """A folder named `~` would be in the working directory, and who removes it by hand loses the home."""
    assert f"{place / 'home' / 'exp1'}: no run there" in run("status", "--log-path=~/exp1").stderr


@pytest.mark.parametrize(
    "words",
    [
        "--master --log-path=",
        "status --log-path=",
        "fork --iteration 2 --to=",
        "export --out=",
        "serve --root=",
    ],
)
def test_directory_whose_name_is_empty_is_refused(run: Run, place: Path, words: str) -> None:
    """It is a variable that is not set, not the working directory."""
    assert "the name of a directory is empty" in refusal(run, place, *words.split())


def test_command_line_of_another_trainer_is_answered_with_a_line_for_each_of_its_options(run: Run) -> None:
    ended = run("--pretrain", "m", "--zero_stage", "3", "--xyzzy", "--iterations=3", "--bogus")
    assert ended.returncode == 2
    assert [line.partition(":")[0] for line in ended.stderr.splitlines()[1:3]] == [
        "  --pretrain",
        "  --zero_stage",
    ]
    assert "did you mean --model?" in ended.stderr and "--iterations" not in ended.stderr
    assert ended.stderr.splitlines()[3].endswith("none is like --xyzzy, --bogus; see run --help")
