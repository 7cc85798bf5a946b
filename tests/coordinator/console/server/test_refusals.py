"""Bad requests: each a 4xx with one line, and nothing is written."""

import base64
import json
import random
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from coordinator.console.server import submission
from coordinator.console.server.client import ServerError
from coordinator.settings.loading import build
from coordinator.settings.tree import SettingsError
from tests.coordinator.console.server.served import Served, serving
from tests.coordinator.examples import tree

MOST = 200_000


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("jobs"), at_once=0, max_body_bytes=MOST) as found:
        yield found


def encoded(text: str = '{"prompt": "1+2=", "answer": "3"}\n') -> str:
    return base64.b64encode(text.encode()).decode()


def job(*options: Any, name: Any = "sums", **files: Any) -> dict[str, Any]:
    return {"name": name, "options": list(options), "files": files}


def bodies() -> Iterator[tuple[str, bytes, int]]:
    """(what is wrong, body of POST /jobs, status)."""
    plain = r""". .. ../x a/b /etc a\b A -a _a é %2e%2e .token a.b <script> ' " $(id) `id` a;b ~ con/../x"""
    others = ("", "a b", "a" * 64, "a\n", "a\0", "\u202e", 5, None, [], {}, True)
    for name in (*plain.split(), *others):
        yield f"name {name!r}", json.dumps(job(name=name)).encode(), 400
    texts = b'{ [] null "x" 1 \xff\xfe {] {"name":"a",}'.split()
    for text in (b"", b"[" * 100_000, *texts):
        yield f"body {text[:9]!r}", text, 400
    for key in ("name", "options", "files"):
        value = json.dumps(job()[key])
        yield f"{key} twice", f'{{"{key}": {value}, "{key}": {value}}}'.encode(), 400
    for key in ("log_path", "command", "root", "__proto__", "state", ""):
        yield f"key {key!r}", json.dumps({**job(), key: 1}).encode(), 400
    lines = (["x"] * 257, [5], [None], [""], ["a" * 5000], ["a\nb"], ["\x1b[2J"])
    for options in (None, "--iterations 3", {}, 5, *lines):
        yield f"options {str(options)[:20]!r}", json.dumps({**job(), "options": options}).encode(), 400
    decided = "--master --worker --log-path --dry-run --version --help --crew -- -n -h --allow-shared-dir "
    decided += "--install-completion --show-completion --accept-code-change --reset-settings "
    decided += "--log-path=/tmp/x --worker=1 --crew=main"
    for option in decided.split():
        yield f"option {option}", json.dumps(job(option)).encode(), 400
        yield f"option {option} x", json.dumps(job("--iterations", "3", option, "x")).encode(), 400
    wrong = (
        "--iteratons=3 --iterations=0 --iterations=x --num-nodes=0 iteratons=3 foo --model --rl-phase=all "
    )
    wrong += "trainer.learning_rate=-1 rollout.max_tokens=0 --rank-weights=0 a.b.c=1 =1 --tasks=no.jsonl "
    wrong += "--eval-tasks=/no/such.jsonl --config=/etc/passwd --config=../x.toml --reward=os:system "
    wrong += "--environment=subprocess:run rollout.reward=os:system --hosts=a,b --tasks=gym:os:system "
    wrong += "rollout.teacher=http://127.0.0.1:80/v1,key_from=HOME --eval-tasks=verifiers:pip "
    wrong += (
        "eval.sets.a.tasks=gym:os:system engine.args.x=1 cluster.groups.a.nodes=0 --run=/bin/sh --ray=auto"
    )
    for option in [*wrong.split(), "--ssh=sh -c id"]:
        yield f"setting {option}", json.dumps(job(option)).encode(), 400
    paths = "x.sh x.so x.pyc x.pth x .jsonl ../.jsonl é.jsonl x.jsonl/ sitecustomize.py mine.py .. x.jsonl/.."
    further = ("a b.jsonl", "x.jsonl\n", "x\0.jsonl", "a" * 200 + ".jsonl")
    for path in (*paths.split(), *further):
        yield f"file {path[:20]!r}", json.dumps(job(**{path: encoded()})).encode(), 400
    for content in (None, 5, [], {}, "no base64!", "YQ=", "é", True):
        yield f"content {content!r}", json.dumps(job(**{"x.jsonl": content})).encode(), 400
    yield "a file twice", json.dumps(job(**{"a/x.jsonl": encoded(), "b/x.jsonl": encoded()})).encode(), 400
    yield "many files", json.dumps(job(**{f"x{n}.jsonl": encoded() for n in range(33)})).encode(), 400
    yield "files as a list", json.dumps({**job(), "files": ["x.jsonl"]}).encode(), 400
    settings = {
        "x.toml": "iterations = 0", "y.toml": "[rollout]\nreward = 'os:system'", "z.toml": "no toml",
        "g.toml": "[cluster.groups.a]\nnodes = '0'\npython = '/bin/sh'",
    }  # fmt: skip
    for path, content in settings.items():
        yield f"config {path}", json.dumps(job("--config", path, **{path: encoded(content)})).encode(), 400
    yield "a huge body", json.dumps(job("x" * MOST)).encode(), 413
    yield "a huge file", json.dumps(job(**{"x.jsonl": encoded("x" * MOST)})).encode(), 413


def requests() -> Iterator[tuple[str, tuple[str, str, bytes | None, dict[str, str]], int]]:
    """(what is wrong, method, path, body and headers, status) of other requests."""
    good = json.dumps(job()).encode()
    tokens = ("", "x", "Bearer", "Bearer ", "Bearer x", "Basic x", "Bearer a-token-of-the-test", "Bearer é")
    for token in (*tokens, "a-token-of-the-tests"):
        headers = {"Authorization": token.encode().decode("latin-1")}
        yield f"token {token!r}", ("POST", "/jobs", good, headers), 401
        yield f"token {token!r} to look", ("GET", "/jobs", None, headers), 401
    for path in ("/jobs", "/jobs/a", "/jobs/a/report", "/.token", "/no"):
        yield (
            f"no right cookie for {path}",
            ("GET", path, None, {"Authorization": "", "Cookie": "flagpost=x"}),
            401,
        )
    yield "a wrong login", ("POST", "/login", b'{"token": "x"}', {"Authorization": ""}), 401
    for kind in ("text/plain", "multipart/form-data", "application/x-www-form-urlencoded"):
        yield f"a body of {kind}", ("POST", "/jobs", good, {"Content-Type": kind}), 415
    names = "no .. %2e%2e ..%2f..%2fetc %00 .token a%0ab %ff A <b>"
    for name in (*names.split(), "x" * 300):
        for what in ("", "/report", "/logs", "/metrics", "/checkpoint", "/checkpoint/1/..%2f..%2frun.json"):
            yield f"GET {name}{what}", ("GET", f"/jobs/{name}{what}", None, {}), 404
        for what in ("stop", "resume", "guest", "cleanup"):
            yield f"POST {name}/{what}", ("POST", f"/jobs/{name}/{what}", b"{}", {}), 404
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS"):
        yield f"{method}", (method, "/jobs", good, {}), 405


BODIES = list(bodies())
REQUESTS = list(requests())


def test_there_are_many_of_them() -> None:
    assert len(BODIES) + len(REQUESTS) > 250


@pytest.mark.parametrize(("body", "status"), [case[1:] for case in BODIES], ids=[case[0] for case in BODIES])
def test_bad_submission_is_refused_in_one_line_and_nothing_is_written(
    served: Served, body: bytes, status: int
) -> None:
    answer, text, _ = served.ask("POST", "/jobs", body)
    assert (answer, tree(served.root)) == (status, set()), text
    error = json.loads(text)["error"]
    assert error.isprintable() and 5 < len(error) < 600


@pytest.mark.parametrize(("asked", "status"), [c[1:] for c in REQUESTS], ids=[c[0] for c in REQUESTS])
def test_bad_request_is_refused_and_nothing_is_written(
    served: Served, asked: tuple[str, str, bytes | None, dict[str, str]], status: int
) -> None:
    method, path, body, headers = asked
    answer, text, _ = served.ask(method, path, body, **headers)
    if "%2e%2e" in path or "/.." in path:  # the path itself may be normalised before
        assert answer in {404, 405}, text
    else:
        assert answer == status, text
    assert tree(served.root) == set() and json.loads(text)["error"]


def test_bytes_that_nobody_meant_are_refused(served: Served) -> None:
    """Broken copies of a good submission, some of which are good again."""
    chance = random.Random(20)
    good = json.dumps(job("--worker=1", **{"x.jsonl": encoded()})).encode()
    for _ in range(200):
        broken = bytearray(good)
        for _ in range(chance.randint(1, 3)):
            place = chance.randrange(len(broken))
            broken[place : place + chance.randint(0, 2)] = chance.randbytes(chance.randint(0, 2))
        answer, text, _ = served.ask("POST", "/jobs", bytes(broken))
        assert answer == 400 and json.loads(text)["error"], bytes(broken)
    assert tree(served.root) == set()


def test_refusals_of_settings_are_those_of_run(served: Served) -> None:
    assert served.post("/jobs", job("--iterations", "0")) == (
        400,
        "--iterations=0: give 1 or more",
    )
    status, error = served.post("/jobs", job("--iteratons", "3"))
    assert (status, error) == (400, "No such option: --iteratons; did you mean --iterations?")
    status, error = served.post("/jobs", job("foo"))
    assert error.startswith("'foo' is neither a command, nor an option, nor KEY=VALUE")


def test_teachers_of_sources_are_other_servers_too(served: Served) -> None:
    given = ("rollout.teacher=self:answer", "rollout.teachers.math=http://127.0.0.1:80/v1", "trainer.kl=k1")
    status, error = served.post("/jobs", job(*given, "trainer.kl_to=teacher"))
    assert status == 400 and error.startswith("rollout.teachers asks other servers, and this server lets no")


def test_reward_of_a_source_is_no_code_of_the_clients_either(served: Served) -> None:
    status, error = served.post("/jobs", job("rollout.rewards.math=own:score"))
    assert status == 400 and error.startswith(
        "rollout.rewards.math own:score runs code or asks another server"
    )


def test_set_with_the_rewards_of_sources_runs_no_code() -> None:
    given = {"rollout.rewards.math": "numeric", "eval.sets.a.tasks": "builtin:arithmetic"}
    submission._refuse_code(build(given))
    with pytest.raises(SettingsError, match=r"^eval.sets.a.reward own:score runs code"):
        submission._refuse_code(build({**given, "eval.sets.a.reward": "own:score"}))


def test_reward_that_is_not_there_is_refused_wherever_the_job_would_run(served: Served) -> None:
    status, error = served.post("/jobs", job("--reward", "nosuch"))
    assert status == 400 and error.startswith("--reward nosuch: reward 'nosuch': there is exact")
    for option in ("--reward=nosuch", "--reward=exact=1", "--reward=math"):
        submitted = submission.Submission("a", (option,), {})
        with pytest.raises(SettingsError, match="nosuch") if "nosuch" in option else nullcontext():
            submission.check(submitted, [], allow_code=False, is_here=False)


def test_tasks_and_code_of_a_job_are_looked_at_where_it_would_run(served: Served) -> None:
    status, error = served.post("/jobs", job("--tasks", "x.jsonl", **{"x.jsonl": encoded('{"prompt": 3}')}))
    assert status == 400 and error.startswith("x.jsonl:1: `prompt` must be a non-empty string")
    code = {"my_rewards.py": b"def score(task, completion):\n    return 1.0\n"}
    submitted = submission.Submission("a", ("--reward=my_rewards:scor",), code)
    with pytest.raises(SettingsError, match=r"no such name in my_rewards.py; did you mean score\?"):
        submission.check(submitted, [], allow_code=True, is_here=True)
    with pytest.raises(SettingsError, match=r"no such name in my_rewards.py; did you mean score\?"):
        submission.check(submitted, [], allow_code=True, is_here=False)
    code = {"my_rewards.py": b"import a_library_of_the_nodes\n"}
    submitted = submission.Submission("a", ("--reward=my_rewards:score",), code)
    submission.check(submitted, [], allow_code=True, is_here=False)


@pytest.mark.parametrize("model", ["./mine", "/nowhere/mine", "models/mine/v2"])
def test_model_that_the_server_does_not_have_is_refused(served: Served, model: str) -> None:
    status, error = served.post("/jobs", job("--model", model))
    assert status == 400 and error.startswith(f"--model {model}: the server has no such directory, and no")


def test_whole_refused_place_is_empty(tmp_path: Path) -> None:
    """What is checked is written elsewhere, and gone afterwards."""
    with serving(tmp_path / "jobs", at_once=0) as served:
        served.post("/jobs", job("--config", "x.toml", **{"x.toml": encoded("iterations = 0")}))
        assert tree(tmp_path) == {"jobs"}


def test_guest_of_a_job_that_does_not_run_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path / "jobs", at_once=0) as alone:
        job = alone.server.submit([], name="sums")
        assert alone.post("/jobs/sums/guest", {"after": "0"}) == (
            400, "after: give how many `guests` are in the job"
        )  # fmt: skip
        refusal = "sums is submitted: a guest helps a job that runs"
        assert alone.post("/jobs/sums/guest", {"after": 0}) == (409, refusal)
        with pytest.raises(ServerError, match=refusal):
            job.guest()
        assert job.status()["guests"] == []
