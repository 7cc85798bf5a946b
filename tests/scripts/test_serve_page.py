"""Every command of docs/serve.md, and the client from Python, with a server and a job that takes no time."""

import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli import main
from coordinator.console.commands.parse import COMMANDS
from coordinator.console.server.app import Service
from coordinator.console.server.client import SERVER_VARIABLE, TOKEN_VARIABLE
from coordinator.console.server.launchers import Launcher
from coordinator.machine import run_command
from tests.commands import ask_forked
from tests.coordinator.console.server.served import TOKEN, Served, serving
from tests.scripts.pages import REPOSITORY, blocks, commands

PAGE = REPOSITORY / "docs" / "serve.md"
ALL = [*dict.fromkeys(commands(PAGE))]
CLIENT = r"run (submit|jobs|overwatch|stop|resume|fetch|logs --server)( .*)?"
PORT = 8765


class MadeUp(Launcher):
    """Its jobs make up a run of three iterations."""

    def command(self, log_path: Path, options: Any, output: Path) -> list[str]:
        program = "import sys; from pathlib import Path; from tests.scripts.documented_run import make_run; "
        program += "print('made up'); make_run(Path(sys.argv[1]), 3)"
        return [sys.executable, "-c", program, str(log_path)]


@pytest.fixture
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with the files that the page names."""
    place = tmp_path / "laptop"
    place.mkdir()
    (place / "sums.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n')
    (place / "sums.toml").write_text("iterations = 3\n")
    (place / "my_rewards.py").write_text("def score(task, completion):\n    return 1.0\n")
    monkeypatch.chdir(place)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    return place


@pytest.fixture
def served(tmp_path: Path, laptop: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(run_command, "ask_run", ask_forked)
    with serving(tmp_path / "jobs", launcher=MadeUp(), allow_code=True) as found:
        monkeypatch.setenv(SERVER_VARIABLE, found.url)
        yield found


def call(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", words)
    return main()


def submitted(served: Served) -> None:
    """The page's job, finished."""
    job = served.server.submit(["--iterations", "16"], name="sums")
    assert job.wait(60) == "finished"


def test_page_has_commands_of_every_kind() -> None:
    kinds = {words.split()[1] for words in ALL if words.startswith("run ")}
    assert kinds >= {"serve", "submit", "jobs", "overwatch", "logs", "stop", "resume", "fetch"}


@pytest.mark.parametrize("command", [command for command in ALL if re.fullmatch(CLIENT, command)])
def test_command_of_the_client_works(
    command: str, served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(command.replace(f"http://127.0.0.1:{PORT}", served.url))
    if words[1] != "submit":
        submitted(served)
    assert call(words, monkeypatch) == 0, capsys.readouterr().err
    said = capsys.readouterr()
    assert said.out.strip() and not said.err
    if words[1] == "submit":
        assert served.server.job(said.out.strip()).wait(60) == "finished"
    if words[1] == "fetch":
        assert list(Path(words[words.index("-o") + 1]).iterdir())


@pytest.mark.parametrize("command", [command for command in ALL if command.startswith("python ")])
def test_file_alone_is_the_same_client(command: str, served: Served) -> None:
    submitted(served)
    shutil.copy(REPOSITORY / "scripts" / "flagpost_client.py", "client.py")
    words = shlex.split(command.replace("python scripts/flagpost_client.py", "client.py"))
    ended = subprocess.run([sys.executable, "-I", *words], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "") and ended.stdout.strip()


def test_client_in_scripts_is_the_module() -> None:
    link = REPOSITORY / "scripts" / "flagpost_client.py"
    assert link.read_bytes() == (REPOSITORY / "coordinator" / "console" / "server" / "client.py").read_bytes()


def test_python_of_the_page_runs(served: Served, laptop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [block for block in blocks(PAGE) if block.kind == "python"]
    exec(block.text.replace(f"http://127.0.0.1:{PORT}", served.url), {"token": TOKEN})
    assert capsys.readouterr().out.startswith("finished 0.43")
    assert (laptop / "model" / "config.json").is_file()


@pytest.mark.parametrize("command", [command for command in ALL if command.startswith("run serve ")])
def test_server_of_the_page_would_start(
    command: str, tmp_path: Path, laptop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Service, str, int]] = []

    async def serve(service: Service, host: str, port: int, where: str) -> int:
        asked.append((service, host, port))
        return 0

    program = tmp_path / "bin" / "sbatch"
    program.parent.mkdir()
    program.touch(mode=0o755)
    (laptop / "scripts").mkdir()
    shutil.copy(REPOSITORY / "scripts" / "node.sbatch", laptop / "scripts")
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("coordinator.console.commands.serve._serve", serve)
    words = shlex.split(command.replace("/shared/", f"{tmp_path}/"))
    assert call(words, monkeypatch) == 0
    ((service, host, port),) = asked
    assert (service.root, host, port) == (tmp_path / "jobs", "127.0.0.1", PORT)
    assert service.allow_code == ("--allow-code" in words) and service.at_once == 1
    kind = words[words.index("--launcher") + 1] if "--launcher" in words else "local"
    assert service.launcher.kind == kind


def test_port_of_the_page_is_the_usual_one() -> None:
    text = PAGE.read_text()
    assert set(re.findall(r"127\.0\.0\.1:(\d+)", text)) == {str(PORT)}
    (command,) = COMMANDS["serve"].registered_commands
    assert command.callback is not None
    assert inspect.signature(command.callback).parameters["port"].default == PORT
