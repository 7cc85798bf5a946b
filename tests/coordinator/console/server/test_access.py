"""Who may ask a server, where the token comes from, and what keeps a server from starting."""

import os
import re
import socket
import stat
from pathlib import Path

import pytest

from coordinator.console.commands.alone import alone
from coordinator.console.commands.serve import serve
from coordinator.console.server.access import FILE, TokenCheck, find_token
from coordinator.console.server.client import TOKEN_VARIABLE, Server, ServerError, main
from coordinator.console.server.launchers import Launcher
from coordinator.machine.network import LOOPBACK
from coordinator.settings.tree import SettingsError
from tests.coordinator.console.server.served import TOKEN


@pytest.fixture(autouse=True)
def without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


def test_token_is_made_once_and_for_its_user_alone(tmp_path: Path) -> None:
    os.umask(before := os.umask(0))
    try:
        token, where = find_token(tmp_path, None)
    finally:
        os.umask(before)
    assert where == str(tmp_path / FILE) and len(token) > 30
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    assert find_token(tmp_path, None) == (token, where)


def test_token_of_the_environment_comes_before_the_one_that_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert find_token(tmp_path, None) == (TOKEN, TOKEN_VARIABLE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        (TOKEN, 0o640, "others may read it; chmod 600"),
        ("short", 0o600, "a token has at least 16"),
        ("with a space in it, and long", 0o600, "no spaces"),
        ("é" * 20, 0o600, "a token has at least 16"),
        (None, 0o600, "No such file"),
    ],
)
def test_token_file_that_cannot_serve_is_refused(
    tmp_path: Path, text: str | None, mode: int, said: str
) -> None:
    file = tmp_path / "token"
    if text is not None:
        file.write_text(text)
        file.chmod(mode)
    with pytest.raises(SettingsError, match=said):
        find_token(tmp_path, file)


def test_only_the_token_itself_is_taken() -> None:
    access = TokenCheck(TOKEN)
    assert access.has_token(f"Bearer {TOKEN}") and access.has_token(f"bearer {TOKEN} ")
    for wrong in ("", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer \udcff"):
        assert not access.has_token(wrong)
    assert (
        access.has_cookie(access.cookie)
        and not access.has_cookie(TOKEN)
        and not access.is_token(access.cookie)
    )


def test_server_that_cannot_begin_says_why(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="there is no directory"):
        serve(Path("/no/such/place/jobs"), Launcher())
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=rf"--port {port}: .*in use"):
            serve(tmp_path / "jobs", Launcher(), port=port)


def test_second_server_of_a_directory_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    refused = rf"--root {tmp_path}: run serve is at work there, pid {os.getpid()}; stop it first"
    with alone("run serve", "--root", tmp_path, ""), pytest.raises(SettingsError, match=refused):
        serve(tmp_path, Launcher())


@pytest.mark.parametrize(
    "url",
    [
        "ftp://x",
        "http://",
        "http://x:port",
        "file:///etc/passwd",
        "http://[::1",
        "http://x..y",
        "http://x y",
        "http://x/ü",
    ],
)
def test_client_refuses_an_address_that_is_none(url: str) -> None:
    with pytest.raises(ServerError, match="give http://HOST:PORT"):
        Server(url, TOKEN)


def test_client_names_a_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.console.server.client.PATIENCE_S", 0.0)
    with socket.socket() as silent:
        silent.bind((LOOPBACK, 0))
        url = f"http://{LOOPBACK}:{silent.getsockname()[1]}"
        with pytest.raises(ServerError, match=f"--server {url} does not answer") as error:
            Server(url, TOKEN).jobs()
    assert error.value.status == 0


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"one\ntwo", "a token is one line of ASCII letters"),
        ("\u20acuro".encode(), "a token is one line of ASCII letters"),
        (b"one two", "without spaces"),
        (b"\xff\x00", "can't decode|a token is one line"),
    ],
)
def test_client_refuses_what_can_be_no_token_in_one_line(
    data: bytes,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (file := tmp_path / "token").write_bytes(data)
    ask = ["jobs", "--server", f"http://{LOOPBACK}:1"]
    assert main([*ask, "--token-file", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"run: --token-file {file}: ") and re.search(said, line)
    if b"\0" not in data:
        monkeypatch.setenv(TOKEN_VARIABLE, os.fsdecode(data))
        assert main(ask) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"run: {TOKEN_VARIABLE}: a token is one line")


def test_client_says_at_once_that_it_waits_for_a_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("coordinator.console.server.client.PATIENCE_S", 0.5)
    monkeypatch.setattr("coordinator.console.server.client.AGAIN_S", 0.1)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    with socket.socket() as silent:
        silent.bind((LOOPBACK, 0))
        url = f"http://{LOOPBACK}:{silent.getsockname()[1]}"
        assert main(["jobs", "--server", url]) == 1
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith(f"run: {url} does not answer: ") and first.endswith("; trying for 0.5 s")
    assert last.startswith(f"run: --server {url} does not answer: ")


def test_client_does_not_wait_for_a_name_that_nobody_knows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[object] = []

    def unknown(*about: object, **_more: object) -> None:
        asked.append(about)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr("coordinator.console.server.client.PATIENCE_S", 2.0)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert main(["jobs", "--server", "http://nobody:8765"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "http://nobody:8765 does not answer: " in line and "Name or service not known" in line
    assert len(asked) == 1
