"""The command `run` as people and schedulers start it: what it prints, its exit code, what it writes."""

from pathlib import Path
from typing import Any

import pytest

from coordinator.directory.layout import FORMAT
from tests.coordinator.examples import run_dir_at, tree, write_json
from tests.coordinator.typed_command import Run, lose_privileges, refusal

BAD = [
    ("--master --num-nodes 3 --rank-weights 2,1", "--rank-weights 2,1 has 2 weights for --num-nodes 3"),
    ("--master --num-nodes 2 --rank-weights 1,0", "--rank-weights 1,0: '0' is not positive"),
    ("--master --num-nodes 2 --rank-weights 1,-1", "--rank-weights 1,-1: '-1' is not positive"),
    ("--master --num-nodes 2 --rank-weights 1,x", "--rank-weights 1,x: 'x' is not a number"),
    ("--master --num-nodes 0", "--num-nodes=0: give 1 or more"),
    ("--worker 0", "--worker 0: rank 0 is the master"),
    ("--worker -1", "--worker -1: outside the range"),
    ("--worker x", "--worker x: not a rank"),
    ("--worker", "--worker: give the rank of this machine, e.g. --worker 1"),
    ("--worker --num-nodes 3", "--worker --num-nodes: give the rank of this machine, e.g. --worker 1 --num"),
    ("--worker 3 --num-nodes 3", "--worker 3 is outside --num-nodes 3 (workers are 1 to 2)"),
    ("--worker 1 --num-nodes x", "--num-nodes=x: give a whole number"),
    ("--worker 1 rollot.seed=1", "unknown setting rollot.seed; did you mean rollout.seed=1?"),
    ("--master --worker 1", "--master and --worker 1 exclude each other"),
    (
        "--worker 1 --accept-code-change",
        "--accept-code-change is for the master; leave it out beside --worker 1",
    ),
    ("--num-nodes 3", "this node has no role in a run of 3 nodes"),
    ("rollout.tasks_per_iter=8", "unknown setting rollout.tasks_per_iter; did you mean"),
    ("trainer.learning_rate=fast", "trainer.learning_rate=fast: give a number"),
    ("trainer.learning_rate=Infinity", "trainer.learning_rate=inf: give a finite number"),
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
    ("metrics", "did you mean run report?"),
    ("merge", "did you mean run export --merge?"),
    ("convert", "did you mean run export?"),
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
    ("lr=1e-6", "unknown setting lr; did you mean trainer.learning_rate=1e-06?"),
    ("--learning-rate 1", "No such option: --learning-rate; did you mean trainer.learning_rate=1?"),
    (
        "--batch-size=4",
        "No such option: --batch-size; did you mean trainer.global_batch_size=4? (in samples;",
    ),
    ("--beta=0.04", "set both trainer.kl=k3 and trainer.kl_coefficient=0.04; see run"),
    ("--num_generations 8", "No such option: --num_generations; did you mean rollout.samples_per_task=8?"),
    ("--ppo_mini_batch_size 16 n=4", "(in samples: theirs x rollout.samples_per_task: 16 x 4 = 64)"),
    ("--top_k -1", "No such option: --top_k; did you mean rollout.top_k=0?"),
    ("--load_in_4bit", "did you mean trainer.lora.base_dtype=nf4? See run --help"),
    ("--gradient_checkpointing", "leave it out: trainer.activation_checkpointing=true is the default"),
    ("--no_advantage_std_norm --master", "did you mean trainer.advantage=centred?"),
    ("--eps_clip_low_high 0.2 0.27", "did you mean trainer.clip_low=0.2 trainer.clip_high=0.27?"),
    ("--betas 0.9 0.99 --master", "did you mean trainer.betas=0.9,0.99?"),
    ("--reward_funcs a b", "did you mean --reward? (once for each: a name of ours, or FILE.py:FUNCTION)"),
    ("--reward --dry-run", "--reward: --dry-run follows; give a value between them"),
    (
        "trainer.engine_correction_cap=0.5",
        "trainer.engine_correction_cap=0.5 with trainer.engine_correction=",
    ),
    ("local 3", "nor KEY=VALUE; a number of nodes is given as --num-nodes 3"),
    ("--worker 1 2", "nor KEY=VALUE; e.g. trainer.learning_rate=1e-6"),
    ("--use-wandb abc123", "metrics.sinks=wandb; it reads WANDB_API_KEY"),
    ("--ac.freq 2", "did you mean trainer.activation_checkpointing=VALUE?"),
    ("--iteration 3", "No such option: --iteration; did you mean --iterations? See run --help"),
    ("local --lr 3", "did you mean trainer.learning_rate=3? See run local --help"),
    ("trainer.betas=0.9", "trainer.betas=0.9: give a list, e.g. 'trainer.betas=[0.9,0.95]'"),
    ("trainer.betas=[0.9]", "trainer.betas=0.9: give a list, e.g. 'trainer.betas=[0.9,0.95]'"),
    ("rollout.stop=[a,b]", """rollout.stop=[a,b]: give a list, e.g. 'rollout.stop=["a","b"]'"""),
    ("-h", "No such option: -h; did you mean --help?"),
    ("version", "did you mean run --version?"),
    ("--tasks=", "--tasks is empty (a variable that is not set?); give a value"),
    ("--tasks good.jsonl,chat.jsonl", "no such file (give several files as a pattern, e.g. 'data/*.jsonl')"),
    ("config=bad.toml", "unknown setting config; a file of settings is given as --config FILE"),
    ("--config empty", "Is a directory; give a .toml, .yaml or .json file"),
    ("--dry-run --reward exact numeric", "nor KEY=VALUE; give each for itself: --reward exact --reward num"),
    ("launch --hosts a, b", "'b' is not an option; write commas without spaces: --hosts a,b"),
    ("launch --hosts a b", "'b' is not an option; write commas without spaces: --hosts a,b"),
    ("rollout.stop=5", """rollout.stop=5: give a list, e.g. 'rollout.stop=["5"]'"""),
    ("rollout.stop=abc", """rollout.stop=abc: give a list, e.g. 'rollout.stop=["abc"]'"""),
    (
        "--tasks gsm8k",
        "gsm8k: no such file (a data set of Hugging Face: hf:NAME); give a file of JSON lines, CSV",
    ),
    ("--worker 1 --reset-settings", "--reset-settings is for the master; leave it out beside --worker 1"),
    ("--reset-settings trainr", "unknown setting trainr; did you mean trainer?"),
    ("--reset-settings lr=3", "unknown setting lr; did you mean trainer.learning_rate=3?"),
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
    ("--rl-phase all", "--rl-phase=all: give both, rollout or update"),
    ("--rollout-split train-only --rl-phase update", "--rollout-split train-only needs a rollout"),
    ("--rollout-split eval-only", "--rollout-split eval-only makes nothing to train on"),
    ("--config bad.toml", "--config bad.toml: "),
    ("--config absent.toml", "--config absent.toml: No such file or directory"),
    ("status --log-path empty", "no run there"),
    ("status --log-path good.jsonl", "is a file; give the directory of a run"),
    ("samples -n 0", "-n=0: give 1 or more; see run samples --help"),
    ("eval --eval-tasks", "requires an argument; see run eval --help"),
    ("status --jsn", "No such option: --jsn; did you mean --json? See run status --help"),
    ("status runs/exp1", "(runs/exp1); a run directory is given as --log-path runs/exp1; see run status"),
    ("logs runs/exp1", "give the number of a rank, e.g. run logs 1, and the run directory as --log-path"),
    ("diff a b c", "extra argument(s) (c); leave it out; see run diff"),
    (
        "fork --iteration 2 --to x trainer.lr=1",
        "(trainer.lr=1); this command takes no settings; give them where",
    ),
    ("eval --tasks x", "No such option: --tasks; did you mean --eval-tasks x? See run eval --help"),
    ("logs --node 1", "No such option: --node; see run logs --help"),
    ("status --dir x", "No such option: --dir; did you mean --log-path?"),
    ("serve --dir x", "No such option: --dir; did you mean --root?"),
    ("plan --model m --tasks x", "No such option: --tasks; did you mean tasks=x? See run plan --help"),
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
    ("resume", "run resume is for the jobs of a server (run serve); the command that started a run"),
    ("GRPO --iterations 3", "an algorithm is given as trainer.algorithm=grpo"),
    ("--log-path old/checkpoints", "old/checkpoints: is within the run "),
    ("--model ./good.jsonl", "good.jsonl: is a file; give the directory of a model, with its"),
    ("--environment users.py", "did you mean users.py:FUNCTION?"),
    ("plan --model old", "old: is of a run, and no model"),
    ("--environment calculater", "did you mean calculator? There is single_turn, "),
    ("--log-path /proc/x", "--log-path /proc/x: /proc shows the kernel, and keeps no files; give a"),
    ("export", "-o DIR is missing: new directory for the model; see run export --help"),
    ("cleanup --log-path empty", "no run there (no run.json); give the directory of a run"),
    (
        "fork --iteration 2 --log-path empty --to new",
        "no run there (no run.json); give the directory of a run",
    ),
    ("verify --log-path empty", "no run there (no run.json); give the directory of a run"),
    ("plan --log-path empty", "no run there (no run.json); give the directory of a run"),
    ("eval --eval-tasks good.jsonl --log-path empty", "no run there (no run.json); give the directory of a"),
    ("export -o new", "no run there (no such directory); give the directory of a run"),
    ("guest", "--log-path DIR is missing: the run to help (none is at "),
    ("trainer.learning_rate = 1e-5", "there is no space around the =; type trainer.learning_rate=1e-5"),
    ("trainer.learning_rate= 1e-5", "there is no space around the =; type trainer.learning_rate=1e-5"),
    ("trainer.learning_rate =1e-5", "there is no space around the =; type trainer.learning_rate=1e-5"),
    ("--iterations = 3", "there is no space around the =; type --iterations=3"),
    ("--log-path new --expect-gpus 99", "--expect-gpus 99: this machine has "),
    ("--log-path new --rl-phase update", "--rl-phase update: no run is at "),
    ("--log-path new --rl-phase update --dry-run", "--rl-phase update: no run is at "),
    ("help frobnicate", "'frobnicate' is neither a command"),
    ("stats --help", "did you mean run status?"),
    ("fetch job --iteration", "--iteration: a value is missing; see run fetch --help"),
    ("fetch job --iteration x -o new", "--iteration x: give a whole number; see run fetch --help"),
    ("fetch job", "-o DIR is missing; see run fetch --help"),
    ("resume job --foo", "--foo: resume takes no such word; leave it out, or see run resume --help"),
    ("jobs --json=3", "--json=3: it takes no value; leave that out; see run jobs --help"),
    ("cleanup --iteration x", "--iteration x: give the number of an iteration"),
    ("local --master", "run local starts all nodes of this machine"),
    ("local --num-nodes 2 --rank-weights 1", "--rank-weights 1 has 1 weight for --num-nodes 2"),
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


@pytest.mark.parametrize("path", ["locked", "locked/run", "sealed/run"])
def test_log_path_that_is_not_writable_is_refused(run: Run, place: Path, path: str) -> None:
    for name, mode in (("locked", 0o555), ("sealed", 0o000)):
        (place / name).mkdir()
        (place / name).chmod(mode)
    text = refusal(run, place, "--log-path", path, preexec_fn=lose_privileges)
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
    assert "did you mean --model m?" in ended.stderr and "--iterations" not in ended.stderr
    assert ended.stderr.splitlines()[3].endswith("none is like --xyzzy, --bogus")
    assert ended.stderr.splitlines()[4] == "  see run --help"
