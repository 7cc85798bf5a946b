"""Import once on a machine what programs import, and fork them: each engine, torchrun agent, trainer
and check of a model would spend 2 to 5 s of CPU on torch and transformers, each collector 0.3 s on the rest.

    python -P -m trainer.job.forks SOCKET MODULE...                     the server of these programs
    python -I -S forks.py SOCKET GROUPS PYTHON -P -m MODULE ARG...      a client, in place of the program

`run local` starts servers, so that its nodes share the imports. A client hands its descriptors,
its directory, its environment and the command to the server. The server's fork begins a session, and makes a
file named by its process group in the directory GROUPS, as LAUNCHER does (trainer.job.launch), before it
calls `main` of MODULE. The client lives as long as its fork, passes SIGTERM on to it, and ends as it ends.
If the client is killed, the server kills its fork. If no server answers, the client becomes the program, by
exec.

A fork of a process that has used a GPU cannot use it: on a machine with GPUs there is no server that imports
torch.
"""

import contextlib
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module

STANDARD = (0, 1, 2)
"""Descriptors of input, output and errors."""
PATIENCE_S = 5.0
"""How long a client may take to say what it wants; others wait meanwhile."""
_BYTES = 4
"""Bytes of the length that stands before a request."""
_LOST = 1
"""A client's exit status if the server ended before its fork did."""


def is_program(argv: Sequence[str], modules: Sequence[str]) -> bool:
    """Return whether a command is one that a server of `modules` can fork, by the server's Python."""
    return [*argv[:3]] == [sys.executable, "-P", "-m"] and len(argv) > 3 and argv[3] in modules


def client(socket_path: str, groups: str, argv: Sequence[str]) -> list[str]:
    """Return the client's command in place of one that `is_program`."""
    return [sys.executable, "-I", "-S", __file__, socket_path, groups, *argv]


# ---- the client; imports nothing but the standard library


def ask(socket_path: str, groups: str, argv: list[str]) -> int:
    """Have the server fork; return the exit status of the fork. Without a server this does not return."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        request = {"groups": groups, "cwd": os.getcwd(), "env": dict(os.environ), "argv": argv[3:]}
        data = json.dumps(request).encode()
        connection.connect(socket_path)
        socket.send_fds(connection, [len(data).to_bytes(_BYTES)], STANDARD)
        connection.sendall(data)
        pid = int.from_bytes(_read(connection, _BYTES), signed=True)
    except (OSError, EOFError):
        os.execv(argv[0], argv)
    if pid < 0:  # it was killed before it could say who it is
        return _LOST

    def pass_on(number: int, _frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    signal.signal(signal.SIGTERM, pass_on)
    try:
        code = int.from_bytes(_read(connection, _BYTES), signed=True)
    except (OSError, EOFError):
        return _LOST
    # The server keeps the group's number taken until this process ends; then another group could get it.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(groups, str(pid)))
    if code < 0:  # end as the fork has ended
        with contextlib.suppress(OSError):  # nobody handles SIGKILL
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


# ---- the server


def serve(socket_path: str, modules: Sequence[str]) -> None:
    """Import `modules`, then fork whenever a client asks; for ever."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(socket_path)
    listener.listen(128)  # clients wait here for the end of the imports
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # as a node has it, for an engine's connections
    from rollout.processes.imports import importing  # not above, where a client would need it

    with importing():  # and freeze, else a fork's collector would copy all that is shared
        for module in modules:
            import_module(module)
    waiting = select.poll()
    waiting.register(listener, select.POLLIN)
    forks: dict[int, tuple[int, socket.socket]] = {}  # by a descriptor that says when the fork has ended
    clients: dict[int, int] = {}  # of the forks that live, by the descriptor that says when they have ended
    ended: dict[int, tuple[int, socket.socket]] = {}  # by that descriptor too
    while True:
        for descriptor, _ in waiting.poll():
            if descriptor == listener.fileno():
                connection, _ = listener.accept()
                descriptors = [
                    listener.fileno(),
                    *forks,
                    *(fork.fileno() for _, fork in forks.values()),
                    *ended,
                ]
                if (pid := _fork(connection, descriptors)) is None:
                    connection.close()
                    continue
                forks[end := os.pidfd_open(pid)] = pid, connection
                clients[connection.fileno()] = pid
                waiting.register(end, select.POLLIN)
                waiting.register(connection, 0)  # that is, for its end alone
            elif descriptor in forks:
                waiting.unregister(descriptor)
                os.close(descriptor)
                pid, connection = forks.pop(descriptor)
                clients.pop(connection.fileno(), None)
                _tell(connection, _exit_code(pid))
                ended[connection.fileno()] = pid, connection
                waiting.register(connection, select.POLLIN)
            elif descriptor in clients:
                waiting.unregister(descriptor)
                pid = clients.pop(descriptor)
                os.kill(pid, signal.SIGKILL)  # it may have no group of its own yet
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            else:
                waiting.unregister(descriptor)
                pid, connection = ended.pop(descriptor)
                connection.close()
                os.waitpid(pid, 0)


def _exit_code(pid: int) -> int:
    """Return how a process has ended; negative: the signal. It stays a zombie."""
    end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert end is not None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def _tell(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the client was killed, and what it stands for will be
        connection.sendall(number.to_bytes(_BYTES, signed=True))


def _fork(connection: socket.socket, inherited: Sequence[int]) -> int | None:
    """Fork for one client; None if it has gone. `inherited`: the server's descriptors, to close."""
    connection.settimeout(PATIENCE_S)
    try:
        length, descriptors, _, _ = socket.recv_fds(connection, _BYTES, len(STANDARD))
        request = json.loads(_read(connection, int.from_bytes(length)))
    except (OSError, EOFError, ValueError):
        return None
    if len(descriptors) != len(STANDARD):
        return None
    pid = os.fork()
    if pid:
        for descriptor in descriptors:
            os.close(descriptor)
        return pid
    try:
        _tell(connection, os.getpid())  # not the server: it may die now, and the client would start another
        os.setsid()
        for standard, descriptor in zip(STANDARD, descriptors, strict=True):
            os.dup2(descriptor, standard)
        for descriptor in (connection.fileno(), *descriptors, *inherited):
            os.close(descriptor)
        open(os.path.join(request["groups"], str(os.getpid())), "w").close()  # or end: nobody would end it
        os.chdir(request["cwd"])
        code = _become(request["env"], request["argv"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # whatever a user's code has made of them
        os._exit(code or 0)


def _become(env: Mapping[str, str], argv: Sequence[str]) -> int:
    """Run a module's `main` as `python -m` would; `argv`: the module, then its arguments."""
    from rollout.environment_variables import omp_threads

    paths = [places.get("PYTHONPATH", "").split(os.pathsep) for places in (os.environ, env)]
    if paths[0] != paths[1]:
        sys.path[:] = [*filter(None, paths[1]), *(path for path in sys.path if path not in paths[0])]
    os.environ.clear()
    os.environ.update(env)
    if "torch" in sys.modules and (threads := omp_threads(env)):  # read when torch was imported
        sys.modules["torch"].set_num_threads(threads)
    module = import_module(argv[0])
    sys.argv = [str(module.__file__), *argv[1:]]
    return module.main()


if __name__ == "__main__":
    if __spec__ is None:  # a client is run as a file
        sys.exit(ask(sys.argv[1], sys.argv[2], sys.argv[3:]))
    serve(sys.argv[1], sys.argv[2:])
