"""The jail, attacked: whatever code does in it ends with it, and reaches nothing outside."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rollout.sandbox.run import Jail, Limits, Outcome, run, why_no_sandbox
from tests.rollout.rollout_helpers import wait_until

REPOSITORY = Path(__file__).parents[3]
QUICK = Limits(wall_s=20.0, cpu_s=5, processes=8, disk_mib=8)
pytestmark = pytest.mark.skipif(
    why_no_sandbox(Limits()) is not None, reason=f"no sandbox: {why_no_sandbox(Limits())}"
)


def last_line(ended: Outcome) -> str:
    return (ended.stderr.strip().splitlines() or [""])[-1]


def in_jail() -> set[psutil.Process]:
    """The processes of all jails of the machine, those of other tests too."""
    found = set[psutil.Process]()
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if line[-1:] == ["main.py"] or any(one.endswith("jail.py") for one in line):
            found.add(process)
    return found


def until_gone(processes: set[psutil.Process]) -> None:
    wait_until(lambda: not processes & in_jail())


def test_a_program_gets_its_input_and_gives_output_and_exit_code() -> None:
    ended = run("import sys\nprint(input()[::-1])\nprint('no', file=sys.stderr)\nsys.exit(7)", "abc\n", QUICK)
    assert ended == Outcome("cba\n", "no\n", 7, timed_out=False)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import socket; socket.create_connection(('127.0.0.1', 9), 2)", "OSError: [Errno 101]"),
        ("import socket; socket.getaddrinfo('example.org', 80)", "socket.gaierror"),
        ("open('/usr/mine', 'w')", "Read-only file system"),
        (f"open({str(REPOSITORY / 'README.md')!r})", "No such file"),
        ("open('/etc/passwd')", "No such file"),
        ("x = 'a' * 10**11", "MemoryError"),
        ("while True: print('x' * 10**6)", "File too large"),
        (
            "for i in range(99):\n with open(f'f{i}', 'wb') as f: f.write(b'x' * 2**20)",
            "No space left on device",
        ),
        ("import os\nfor i in range(10**6): os.mkdir(f'd{i}')", "No space left on device"),
        ("import os; os.kill(-1, 9)", "No such process"),
        ("open('/proc/1/environ').read()", "Permission denied"),
        ("import os; os.chroot('/tmp')", "Operation not permitted"),
        ("import os; os.setuid(0)", "Operation not permitted"),
        ("input()", "EOFError"),
        (
            "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000): raise OSError('no new user')",
            "no new user",
        ),
    ],
)
def test_what_code_may_not_do_fails(code: str, said: str) -> None:
    ended = run(code, "", QUICK)
    assert said in last_line(ended) and ended.exit_code != 0


def test_nothing_of_the_node_is_in_the_environment_or_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret")
    with open(os.devnull) as file:
        os.set_inheritable(file.fileno(), True)
        look = "for fd in range(3, 999):\n try: os.fstat(fd); print(fd)\n except OSError: pass\n"
        code = f"import os, json\n{look}print(json.dumps(dict(os.environ)))"
        ended = run(code, "", QUICK)
    assert set(json.loads(ended.stdout)) == {"PATH", "HOME", "LANG", "OMP_NUM_THREADS"}


def test_a_processor_limit_ends_what_a_busy_machine_has_not_yet() -> None:
    ended = run("while True: pass", "", Limits(cpu_s=1))
    assert ended.exit_code == 128 + 9 and not ended.timed_out


@pytest.mark.parametrize(
    "code",
    [
        "import time; time.sleep(600)",
        "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; time.sleep(600)",
        "import os, time\nif os.fork() == 0: os.setsid(); os.fork(); time.sleep(600)\ntime.sleep(600)",
        "import os\nwhile True:\n try: os.fork()\n except OSError: pass",
    ],
)
def test_time_that_is_over_ends_everything(code: str) -> None:
    before = in_jail()
    ended = run(code, "", Limits(wall_s=1.5, processes=8))
    assert ended.timed_out
    until_gone(in_jail() - before)


def test_a_daemon_ends_with_the_program_that_has_started_it() -> None:
    before = in_jail()
    code = "import os, time\nif os.fork() == 0:\n os.setsid()\n os.fork()\n time.sleep(600)\nprint('done')"
    assert run(code, "", QUICK).stdout == "done\n"
    until_gone(in_jail() - before)


def test_a_killed_node_leaves_nothing_of_the_jail() -> None:
    script = "from rollout.sandbox.run import run; run('import time; time.sleep(600)')"
    node = subprocess.Popen([sys.executable, "-c", script], cwd=REPOSITORY)
    jail = set[psutil.Process]()

    def is_whole() -> bool:
        jail.update(in_jail() & {*psutil.Process(node.pid).children(recursive=True)})
        return len(jail) >= 3

    wait_until(is_whole)
    node.kill()
    node.wait()
    until_gone(jail)


@pytest.mark.parametrize("code", ["", "a\0b", "print('\ud800')", "import sys; sys.exit(213)"])
def test_odd_programs_only_end(code: str) -> None:
    assert run(code, "", QUICK).exit_code == (1 if code else 0)


def test_leaving_the_context_kills_the_code() -> None:
    before = in_jail()
    with open(os.devnull, "rb") as nothing, Jail({"main.py": "while True: pass"}, QUICK, stdin=nothing):
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 30
    until_gone(in_jail() - before)


def test_a_machine_without_namespaces_runs_nothing(tmp_path: Path) -> None:
    """A user namespace that allows no further ones is such a machine."""
    script = (
        "import sys; from rollout.sandbox.run import *; print(why_no_sandbox(Limits()))\n"
        "try: run('raise SystemExit', limits=Limits())\nexcept NoSandbox as error: print(error)"
    )
    hide = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    argv = ["unshare", "--user", "--map-root-user", "sh", "-c", hide, "-", sys.executable, "-c", script]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    why, error = done.stdout.splitlines()
    assert why == f"this machine refuses {error}" and "unshare" in error and "Errno" in error


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests are it already")
def test_an_ordinary_user_has_the_same_jail() -> None:
    python = "/usr/bin/python3"
    test = "import sys; sys.exit(sys.version_info < (3, 11))"
    if subprocess.run([python, "-c", test]).returncode != 0:
        pytest.skip(f"{python} is too old, and {sys.executable} may be root's alone")
    attack = (
        "import ctypes, os, signal\n"
        "print(ctypes.CDLL(None).unshare(0x10000000), os.path.exists('/etc'), os.getuid())\n"
        "n = 0\ntry:\n while os.fork(): n += 1\n signal.pause()\n"
        "except OSError: print(n)\nopen('/usr/mine', 'w')"
    )
    script = f"from rollout.sandbox.run import *\nprint(run({attack!r}, limits=Limits(processes=8)))"
    done = subprocess.run(
        [python, "-B", "-c", script],
        cwd=REPOSITORY, user=65534, group=65534, extra_groups=[], capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "-1 False 1000" in done.stdout and "Read-only file system" in done.stdout, done.stderr
    assert r"\n5\n" in done.stdout  # with init, its program and the jail's own
