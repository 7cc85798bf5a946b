#!/usr/bin/env python3
"""Jobs of a Flagpost server, from any machine with Python 3.11: submit, watch, stop, fetch.

This file needs nothing else. Copy it to a laptop, or use it where Flagpost is installed:

    python flagpost_client.py submit --server http://127.0.0.1:8765 --iterations 3
    run submit --server http://127.0.0.1:8765 --iterations 3

    from coordinator import Server
    job = Server("http://127.0.0.1:8765", token).submit(["--iterations", "3"])
    print(job.wait(), [line["reward"] for line in job.metrics()])

The token comes from FLAGPOST_TOKEN or --token-file, the server also from FLAGPOST_SERVER. Options of `run`
pass through unread: the server checks them.
"""

import argparse
import base64
import codecs
import contextlib
import hashlib
import http.client
import json
import os
import re
import secrets
import socket
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

TOKEN_VARIABLE, SERVER_VARIABLE = "FLAGPOST_TOKEN", "FLAGPOST_SERVER"
PATIENCE_S = 60.0
"""How long a server that does not answer is asked again: it may be started anew."""
TIMEOUT_S = 60.0
"""How long one answer may take."""
CLEANUP_S = 3600.0
AGAIN_S = 0.3
WATCH_S = 1.0
PIECE_BYTES = 1 << 20
ENDED = {"finished": 0, "failed": 1, "lost": 3, "stopped": 130}
"""States of a job that has ended, with the exit code of `run` that says the same."""
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)


class ServerError(RuntimeError):
    """The server has refused, or the call is wrong (`status`: as of HTTP), or no server answers (0). The text
    is one line.
    """

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


class Server:
    """A server of jobs (`run serve`).

        from coordinator import Server

        server = Server("http://127.0.0.1:8765", token)
        job = server.submit(["--iterations", "3", "--tasks", "sums.jsonl"], upload=["sums.jsonl"])
        print(job.wait(), job.metrics()[-1]["reward"])

    Each call is a request. One that may be repeated is repeated for a minute while the server is away.
    """

    def __init__(self, url: str, token: str, say: Callable[[str], None] = lambda line: None) -> None:
        """`url`: http://HOST:PORT. `say`: is told when the server is away. Nothing is sent yet; ServerError
        for another kind of address, or what can be no token.
        """
        try:
            parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
            self._port, host = parts.port, (parts.hostname or "").encode("idna")
        except ValueError:
            raise ServerError(f"--server {url}: give http://HOST:PORT") from None
        is_sendable = parts.path.isascii() and url.isprintable() and " " not in url
        if parts.scheme not in {"http", "https"} or not host or not is_sendable:
            raise ServerError(f"--server {url}: give http://HOST:PORT")
        self.url, self._parts, self._token, self._say = url, parts, _checked(token, "token"), say
        self._has_answered = False

    def submit(
        self, options: Sequence[str], upload: Sequence[str | Path] = (), name: str | None = None
    ) -> "Job":
        """Submit a job and return it. The same `name` with the same options and files is the same job,
        however often it is sent.

        `options`: as behind `run`. `upload`: files that they name, and modules that these need.
        """
        name = name or f"{time.strftime('%m%d-%H%M')}-{secrets.token_hex(2)}"
        files: dict[str, str] = {}
        for path in upload:
            try:
                files[str(path)] = base64.b64encode(Path(path).read_bytes()).decode()
            except OSError as error:
                raise ServerError(f"--upload {path}: {error.strerror}") from None
        answer = self.ask("POST", "/jobs", {"name": name, "options": list(options), "files": files})
        return Job(self, answer["name"])

    def jobs(self) -> list[dict[str, Any]]:
        """Return name, state, iteration, rewards and nodes of each job, in the order of their submission."""
        return self.ask("GET", "/jobs")["jobs"]

    def job(self, name: str) -> "Job":
        """Return the job of this name; nothing is asked yet."""
        return Job(self, name)

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = TIMEOUT_S
    ) -> Any:
        """Return the JSON that the server answers; ServerError for anything else."""
        answer = b"".join(self.stream(method, path, body, timeout_s=timeout_s))
        try:
            return json.loads(answer)
        except ValueError:
            raise ServerError(
                f"--server {self.url}: what answers there is no server of Flagpost", 0
            ) from None

    def stream(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = TIMEOUT_S,
    ) -> Iterator[bytes]:
        """Yield an answer in pieces. Until it begins, the request is repeated while no server is there.
        `timeout_s`: the longest silence in it; None: any, as long as the connection is there.
        """
        response = self._answered(method, path, body, headers or {}, timeout_s)
        try:
            while piece := response.read1(PIECE_BYTES):
                yield piece
            if response.length:
                raise ServerError(f"{self.url} has ended in the middle of an answer", 0)
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{self.url} has ended in the middle of an answer: {error}", 0) from None
        finally:
            response.close()

    def _answered(
        self, method: str, path: str, body: Any, headers: Mapping[str, str], timeout_s: float | None
    ) -> http.client.HTTPResponse:
        until_s, is_said = time.monotonic() + PATIENCE_S, False
        while True:
            try:
                response = self._once(method, path, body, headers, timeout_s)
                self._has_answered = True
                return response
            except (OSError, http.client.HTTPException) as error:
                # A name that was known before will be known again.
                is_unknown = isinstance(error, socket.gaierror) and not self._has_answered
                if is_unknown or time.monotonic() > until_s:
                    raise ServerError(f"--server {self.url} does not answer: {error}", 0) from None
                if not is_said:
                    self._say(f"{self.url} does not answer: {error}; trying for {PATIENCE_S:g} s")
                    is_said = True
            time.sleep(AGAIN_S)

    def _once(
        self, method: str, path: str, body: Any, headers: Mapping[str, str], timeout_s: float | None
    ) -> http.client.HTTPResponse:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._port, timeout=timeout_s or TIMEOUT_S)
        data = None if body is None else json.dumps(body).encode()
        sent = {"Authorization": f"Bearer {self._token}", "Connection": "close", **headers}
        sent |= {"Content-Type": "application/json"} if data is not None else {}
        try:
            connection.connect()
            if timeout_s is None:
                connection.sock.settimeout(None)
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            # It may have refused before it had read everything, and have said so.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, self._parts.path.rstrip("/") + path, body=data, headers=sent)
            response = connection.getresponse()
        except BaseException:
            connection.close()
            raise
        if response.status >= 300:
            with response:
                raise ServerError(_reason(response), response.status)
        return response


def _checked(token: str, where: str) -> str:
    """Return the token, if a header can hold it."""
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ServerError(f"{where}: a token is one line of ASCII letters, digits and signs, without spaces")
    return token


def _reason(response: http.client.HTTPResponse) -> str:
    text = response.read(1 << 16).decode("utf-8", "replace")
    try:
        return str(json.loads(text)["error"])
    except (ValueError, TypeError, KeyError):
        return f"{response.status} {response.reason}"


class Job:
    """A job of a server."""

    def __init__(self, server: Server, name: str) -> None:
        self.server, self.name = server, name
        self._path = f"/jobs/{urllib.parse.quote(name, safe='')}"

    def status(self) -> dict[str, Any]:
        """Return the job: `state`, `error`, `text` for a person, and `run`, which is what `run status --json`
        prints, or None before there is a run.
        """
        return self.server.ask("GET", self._path)

    def wait(self, timeout_s: float | None = None) -> str:
        """Return how the job has ended: finished, failed, lost or stopped. TimeoutError."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while (state := self.status()["state"]) not in ENDED:
            if until_s is not None and time.monotonic() > until_s:
                raise TimeoutError(f"{self.name} is {state} after {timeout_s:g} s")
            time.sleep(WATCH_S)
        return state

    def metrics(self, since: int = 0) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl, one per finished iteration, from number `since` on."""
        return self.server.ask("GET", f"{self._path}/metrics?since={since}")["lines"]

    def logs(self, lines: int = 20, follow: bool = False, rank: int | None = None) -> Iterator[str]:
        """Return what the job prints, or its node `rank`, in pieces; `follow`: until it has ended."""
        query: dict[str, Any] = {"lines": lines, "follow": int(follow)}
        query |= {} if rank is None else {"rank": rank}
        place = f"{self._path}/logs?{urllib.parse.urlencode(query)}"
        pieces = self.server.stream("GET", place, timeout_s=None if follow else TIMEOUT_S)
        return codecs.iterdecode(pieces, "utf-8", "replace")

    def stop(self, now: bool = False) -> dict[str, Any]:
        """Stop the job in order, as one Ctrl+C; `now`: end each node at once. Returns the job."""
        return self.server.ask("POST", f"{self._path}/stop", {"now": now})

    def resume(self) -> dict[str, Any]:
        """Start a job again that has ended; it goes on where it was. Returns the job."""
        return self.server.ask("POST", f"{self._path}/resume", {"after": self.status()["start"]})

    def guest(self) -> dict[str, Any]:
        """Let the server's machine help the job, which must run (`run guest`). Returns the job."""
        return self.server.ask("POST", f"{self._path}/guest", {"after": len(self.status()["guests"])})

    def cleanup(self, iteration: int, dry_run: bool = False, keep_partial: bool = False) -> str:
        """Remove what an interrupted iteration left, as `run cleanup`; returns what that prints."""
        body = {"iteration": iteration, "dry_run": dry_run, "keep_partial": keep_partial}
        return self.server.ask("POST", f"{self._path}/cleanup", body, CLEANUP_S)["text"]

    def report(self, path: str | Path) -> Path:
        """Write the page of `run report` to `path`."""
        data = b"".join(self.server.stream("GET", f"{self._path}/report"))
        temporary = Path(f"{path}.part")
        temporary.write_bytes(data)
        return temporary.replace(path)

    def fetch(
        self, out: str | Path, iteration: int | None = None, say: Callable[[str], None] = lambda line: None
    ) -> list[Path]:
        """Copy a checkpoint's model (None: the newest) into the directory `out`; return the files.

        Each is verified by its checksum. What an earlier call has left there is not fetched again.
        """
        query = "" if iteration is None else f"?iteration={iteration}"
        answer = self.server.ask("GET", f"{self._path}/checkpoint{query}")
        out = Path(out)
        out.mkdir(parents=True, exist_ok=True)
        paths: list[Path] = []
        for name, facts in sorted(answer["files"].items()):
            if not all(map(_FILE.fullmatch, name.split("/"))):
                raise ServerError(f"the server names a file {name!r}, which is not a name for one here")
            place = f"{self._path}/checkpoint/{answer['iteration']}/{name}"
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            paths.append(self._fetch(place, out / name, facts, say))
        return paths

    def _fetch(self, place: str, path: Path, facts: Mapping[str, Any], say: Callable[[str], None]) -> Path:
        """Fetch one file, from where an earlier attempt has ended."""
        if path.is_file() and path.stat().st_size == facts["bytes"] and _sha256(path) == facts["sha256"]:
            say(f"{path} is there")
            return path
        part, failures = path.with_name(f"{path.name}.part"), 0
        while True:
            begun = part.stat().st_size if part.is_file() else 0
            try:
                if begun < facts["bytes"] or not part.is_file():
                    headers = {"Range": f"bytes={begun}-"} if begun else {}
                    with open(part, "ab") as file:
                        for piece in self.server.stream("GET", place, headers=headers):
                            file.write(piece)
            except ServerError as error:
                failures = 0 if part.stat().st_size > begun else failures + 1
                if error.status or failures > 3:
                    raise
                continue
            if _sha256(part) == facts["sha256"]:
                say(f"{path} {facts['bytes']:,} bytes{f', {begun:,} of them earlier' if begun else ''}")
                return part.replace(path)
            part.unlink()
            if not begun:
                raise ServerError(f"{path.name}: what came does not have the checksum of the checkpoint")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- the command line


_OURS = {
    r"^the following arguments are required: (.*)": r"\1 is missing",
    r"^argument ([^:]*): expected one argument$": r"\1: a value is missing",
    r"^argument ([^:]*): ignored explicit argument '(.*)'$": r"\1=\2: it takes no value; leave that out",
    r"^argument ([^:]*): invalid int value: '(.*)'$": r"\1 \2: give a whole number",
    r"^argument ([^:]*): invalid choice: '(.*?)' \(choose from (.*)\)$": r"\2: there is \3",
    r"--out/-o": "-o DIR",
    r"--lines/-n": "--lines",
}
"""What argparse says, as patterns, and what we say."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        text = message
        for pattern, words in _OURS.items():
            text = re.sub(pattern, words, text)
        raise ServerError(f"{text}; see {self.prog} --help")

    def format_usage(self) -> str:
        return super().format_usage().replace("usage:", "Usage:", 1)

    def format_help(self) -> str:
        return super().format_help().replace("usage:", "Usage:", 1)


def main(arguments: Sequence[str] | None = None, program: str = "flagpost_client.py") -> int:
    """Parse and call; return an exit code: 0, 1 (no answer), 2 (refused), or that of the job."""
    parser = _Parser(prog=program, description="Jobs of a Flagpost server (run serve).")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (call, text, add) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.add_argument(
            "--server",
            metavar="URL",
            default=os.environ.get(SERVER_VARIABLE),
            help=f"address of the server; default: ${SERVER_VARIABLE}",
        )
        command.add_argument(
            "--token-file", metavar="FILE", help=f"file with the token; default: ${TOKEN_VARIABLE}"
        )
        command.usage = add(command)
        command.set_defaults(call=call)
    try:
        words = list(sys.argv[1:] if arguments is None else arguments)
        has_path = any(word.partition("=")[0] == "--log-path" for word in words)
        if words and words[0] in OF_RUNS and (has_path or words in (["stop"], ["resume"], ["fetch"])):
            name = f"{words[0]} --log-path" if has_path else words[0]
            raise ServerError(f"run {name} is for the jobs of a server (run serve); {OF_RUNS[words[0]]}")
        typed, later_words = parser.parse_known_args(words)
        if "/" in (getattr(typed, "name", None) or "") and typed.command in OF_RUNS:
            raise ServerError(
                f"run {typed.command} {typed.name}: give the name of a job; {OF_RUNS[typed.command]}"
            )
        if later_words and typed.command != "submit":
            raise ServerError(
                f"{' '.join(later_words)}: {typed.command} takes no such word; leave it out, or see "
                f"{program} {typed.command} --help"
            )
        return typed.call(_server(typed), typed, later_words)
    except ServerError as error:
        print(f"run: {_plain(str(error))}", file=sys.stderr)
        return 2 if error.status else 1
    except BrokenPipeError:  # `... logs | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"run: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _server(typed: argparse.Namespace) -> Server:
    if not typed.server:
        raise ServerError(f"--server is missing: give http://HOST:PORT, or set {SERVER_VARIABLE}")
    if not typed.token_file:
        token = os.environ.get(TOKEN_VARIABLE, "").strip()
        if not token:
            raise ServerError(f"--token-file is missing: name the file of the token, or set {TOKEN_VARIABLE}")
        return Server(typed.server, _checked(token, TOKEN_VARIABLE), _warn)
    where = f"--token-file {typed.token_file}"
    try:
        token = Path(typed.token_file).read_text().strip()
    except (OSError, ValueError) as error:
        raise ServerError(f"{where}: {getattr(error, 'strerror', None) or error}") from None
    return Server(typed.server, _checked(token, where), _warn)


def _warn(line: str) -> None:
    print(f"run: {_plain(line)}", file=sys.stderr, flush=True)


def _submit(server: Server, typed: argparse.Namespace, options: Sequence[str]) -> int:
    for word in options:
        value = word.partition("=")[2] or word
        if value not in typed.upload and os.path.isfile(value):
            _warn(f"{value} is a file here, and is not sent: the server looks for its own; to send this "
                  f"one: --upload {value}")  # fmt: skip
    print(server.submit(options, typed.upload, typed.name).name)
    return 0


def _jobs(server: Server, typed: argparse.Namespace, _rest: Sequence[str]) -> int:
    listed = server.jobs()
    if typed.json:
        print(json.dumps(listed))
        return 0
    print(_plain(_table(listed)))
    return 0


def _table(listed: Sequence[Mapping[str, Any]]) -> str:
    rows = [("job", "state", "iteration", "reward", "")]
    for job in listed:
        points: list[list[float]] = job["points"].get("reward") or []
        total = f"/{job['iterations']}" if job.get("iterations") else ""
        iteration = f"{job['iteration']}{total}" if job.get("iteration") else ""
        reward = f"{points[-1][1]:.3f}" if points else ""
        rows.append((job["name"], job["state"], iteration, reward, job["error"] or job["waiting"]))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]).rstrip()
        for row in rows
    )


def _repaint(text: str, first: bool) -> str:
    """Return what writes `text` over the one before, from the terminal's first line on."""
    # Later, line by line: some terminals move a screen that is cleared at once to their scrollback.
    begin = "\x1b[H\x1b[J" if first else "\x1b[H"
    return begin + "".join(f"{line}\x1b[K\n" for line in text.splitlines()) + "\x1b[J"


def _overwatch(server: Server, typed: argparse.Namespace, _rest: Sequence[str]) -> int:
    """Show all jobs, or one until it has ended; live in a terminal."""
    shown, live = "", sys.stdout.isatty()
    while True:
        job = server.job(typed.name).status() if typed.name else None
        text = _plain(job["text"] if job else _table(server.jobs()))
        if text != shown:
            print(_repaint(text, first=not shown) if live else f"{text}\n", end="", flush=True)
            shown = text
        if job and job["state"] in ENDED:
            return ENDED[job["state"]]
        time.sleep(WATCH_S)


def _logs(server: Server, typed: argparse.Namespace, _rest: Sequence[str]) -> int:
    for text in server.job(typed.name).logs(typed.lines, typed.follow, typed.rank):
        print(_plain(text), end="", flush=True)
    return 0


def _stop(server: Server, typed: argparse.Namespace, _rest: Sequence[str]) -> int:
    state = server.job(typed.name).stop(typed.now)["state"]
    print(state if state in ENDED else f"{state}; it ends after what it has begun, or at once with --now")
    return 0


def _resume(server: Server, typed: argparse.Namespace, _rest: Sequence[str]) -> int:
    print(server.job(typed.name).resume()["state"])
    return 0


def _guest(server: Server, typed: argparse.Namespace, _rest: Sequence[str]) -> int:
    print(f"guest {server.job(typed.name).guest()['guests'][-1]['number']}")
    return 0


def _fetch(server: Server, typed: argparse.Namespace, _rest: Sequence[str]) -> int:
    job = server.job(typed.name)
    if typed.report:
        Path(typed.out).mkdir(parents=True, exist_ok=True)
        print(job.report(Path(typed.out) / "report.html"))
    else:
        job.fetch(typed.out, typed.iteration, print)
    return 0


def _plain(text: str) -> str:
    """Text from others must not steer the terminal."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "?" for sign in text)


def _of_name(command: argparse.ArgumentParser) -> str:
    command.add_argument("name", metavar="NAME", help="the job")
    return "%(prog)s [OPTIONS] NAME"


def _of_submit(command: argparse.ArgumentParser) -> str:
    command.add_argument("--upload", metavar="FILE", action="append", default=[], help="also send this file")
    command.add_argument(
        "--name", metavar="NAME", help="name of the job; repeating a submission returns the same job"
    )
    return "%(prog)s [OPTIONS] [OPTIONS OF run] [KEY=VALUE ...]"


def _of_jobs(command: argparse.ArgumentParser) -> str:
    command.add_argument("--json", action="store_true", help="print JSON")
    return "%(prog)s [OPTIONS]"


def _of_overwatch(command: argparse.ArgumentParser) -> str:
    command.add_argument("name", metavar="NAME", nargs="?", help="the job; default: all")
    return "%(prog)s [OPTIONS] [NAME]"


def _of_logs(command: argparse.ArgumentParser) -> str:
    command.add_argument(
        "--rank", type=int, metavar="N", help="show only this node, its engine and its trainer"
    )
    command.add_argument("--lines", "-n", type=int, metavar="N", default=20, help="show the last N lines")
    command.add_argument(
        "--follow", "-f", action="store_true", help="follow new lines, until the job has ended"
    )
    return _of_name(command)


def _of_stop(command: argparse.ArgumentParser) -> str:
    command.add_argument("--now", action="store_true", help="do not wait for work in progress")
    return _of_name(command)


def _of_fetch(command: argparse.ArgumentParser) -> str:
    command.add_argument("--out", "-o", metavar="DIR", required=True, help="directory for the files")
    command.add_argument(
        "--iteration", type=int, metavar="N", help="iteration of the checkpoint; default: the newest"
    )
    command.add_argument("--report", action="store_true", help="fetch the page of `run report` instead")
    return _of_name(command)


COMMANDS: dict[str, tuple[Callable[..., int], str, Callable[[argparse.ArgumentParser], str]]] = {
    "submit": (_submit, "Submit a job; takes the options of `run`, and prints the job's name.", _of_submit),
    "jobs": (_jobs, "List the jobs.", _of_jobs),
    "overwatch": (_overwatch, "Watch all jobs, or one, live.", _of_overwatch),
    "logs": (_logs, "Print the output of a job.", _of_logs),
    "stop": (_stop, "Stop a job; `run resume` continues it.", _of_stop),
    "resume": (_resume, "Continue a job that has ended.", _of_name),
    "guest": (_guest, "Let the server's machine help a running job.", _of_name),
    "fetch": (_fetch, "Download a checkpoint's model, verified, or the report.", _of_fetch),
}

OF_RUNS = {
    "jobs": "of a run: run status --log-path DIR",
    "overwatch": "of a run: run status --log-path DIR --watch",
    "stop": "Ctrl+C ends a run, where its master or `run local` was started (or kill -INT its process)",
    "resume": "the command that started a run, typed again, resumes it",
    "fetch": "of a run: run export --log-path DIR -o OUT, or run report --log-path DIR",
}
"""What does with a run what a command does with a job."""

if __name__ == "__main__":
    sys.exit(main())
