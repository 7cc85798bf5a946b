"""The program that makes a jail and runs code in it that nobody has read. It needs only Python's library.

    python -I -S jail.py FD        stdin, stdout, stderr: those of the code;  FD: a file with the job, as JSON

    this program, an alarm clock --- init of the namespaces --- the code: python -I main.py

The code gets namespaces of its own: no network, no process but its own, and a root that is a tmpfs of
`disk_bytes` with /usr and Python, read-only. When init ends, the kernel ends everything in them.
Init ends when the code ends, or this program: by SIGALRM after `wall_s`, or because its parent has ended.

The exit code is that of the code; 128 + N: signal N ended it. If the jail cannot be made, no code runs,
a line on stderr says why, and the exit code is NO_JAIL.
"""

import contextlib
import ctypes
import json
import os
import platform
import resource
import signal
import sys
from typing import Any, NoReturn

NO_JAIL = 213
ROOT = "/sys"
"""Where the new root is mounted before it becomes the root: a directory that is everywhere, and of no use."""
INNER_ID = 1000
FIRST_UID = 0x40000000
"""A root user's code runs as FIRST_UID + a process id: it owns nothing, and its processes are counted."""

_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000  # mount, UTS, IPC, PID, network
_NEWUSER = 0x10000000
_NOSUID, _NODEV, _BIND, _REC, _PRIVATE, _DETACH = 0x2, 0x4, 0x1000, 0x4000, 0x40000, 0x2
_PDEATHSIG, _DUMPABLE, _NO_NEW_PRIVS = 1, 4, 38  # of prctl
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR = 442

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> NoReturn:
    """Run the job."""
    with os.fdopen(int(sys.argv[1])) as file:
        job: dict[str, Any] = json.load(file)
    _prctl(_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        uid = _unshare()
    except OSError as error:
        _refuse(error)
    signal.setitimer(signal.ITIMER_REAL, job["wall_s"])
    if (init := os.fork()) == 0:
        try:
            _prctl(_PDEATHSIG, signal.SIGKILL)
            _prctl(_DUMPABLE, 0)
            _new_root(job)
            if (code := os.fork()) == 0:
                _become(job, uid)
        except OSError as error:
            _refuse(error)
        ended = _wait(code)
        os._exit(ended if ended != NO_JAIL else 1)
    os._exit(_wait(init))


def _unshare() -> int | None:
    """Move to new namespaces, as root of them. Return the user to become, if this is the machine's root."""
    with open("/proc/self/uid_map") as file:
        is_root = os.geteuid() == 0 and file.read().split() == ["0", "0", str(2**32 - 1)]
    pid, uid, gid = os.getpid(), os.geteuid(), os.getegid()
    if not is_root:
        _call("unshare", _NEWUSER | _NAMESPACES)
        _map(pid, f"{INNER_ID} {uid} 1", f"{INNER_ID} {gid} 1")
        return None
    os.setgroups([])
    user = FIRST_UID + pid
    begin, done = os.pipe()
    if (writer := os.fork()) == 0:  # only who is outside may map two users
        os.read(begin, 1)
        _map(pid, *[f"0 0 1\n{user} {user} 1"] * 2)
        os._exit(0)
    _call("unshare", _NEWUSER | _NAMESPACES)
    os.write(done, b".")
    if os.waitpid(writer, 0)[1] != 0:
        raise OSError(f"a map of two users to /proc/{pid}/uid_map")
    return user


def _map(pid: int, users: str, groups: str) -> None:
    for name, text in (("setgroups", "deny"), ("uid_map", users), ("gid_map", groups)):
        with open(f"/proc/{pid}/{name}", "w") as file:
            file.write(text)


def _new_root(job: dict[str, Any]) -> None:
    """Make a root of what the code may see, and write the job's files to its /tmp."""
    os.umask(0o022)  # a node keeps its files to itself, and the code is another user
    _mount("none", "/", None, _REC | _PRIVATE)
    _mount("tmpfs", ROOT, "tmpfs", _NOSUID | _NODEV, f"size={job['disk_bytes']},nr_inodes=10000,mode=755")
    bound: list[str] = []
    for path in ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", *job["readable"]):
        inside = ROOT + path
        if any(path == above or path.startswith(above + "/") for above in bound) or not os.path.isdir(path):
            continue
        bound.append(path)
        if os.path.islink(path) and path.count("/") == 1:
            os.symlink(os.readlink(path), inside)
            continue
        os.makedirs(inside, exist_ok=True)
        _mount(path, inside, None, _BIND | _REC)
        _read_only(inside)
    os.mkdir(f"{ROOT}/dev")
    for name in ("null", "zero", "urandom"):
        open(f"{ROOT}/dev/{name}", "w").close()
        _mount(f"/dev/{name}", f"{ROOT}/dev/{name}", None, _BIND)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{ROOT}/dev/{name}")
    os.mkdir(f"{ROOT}/proc")
    with contextlib.suppress(
        OSError
    ):  # a container that hides parts of /proc allows none; Python does without
        _mount("proc", f"{ROOT}/proc", "proc", _NOSUID | _NODEV)
    for name in ("tmp", "dev/shm"):
        os.makedirs(f"{ROOT}/{name}", exist_ok=True)
        os.chmod(f"{ROOT}/{name}", 0o777)
    for name, text in job["files"].items():
        with open(f"{ROOT}/tmp/{name}", "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
    os.chdir(ROOT)
    if _libc.syscall(_PIVOT_ROOT[platform.machine()], b".", b".") != 0:
        raise _error("pivot_root")
    _call("umount2", b".", _DETACH)
    if os.path.isdir("/proc/sys/user"):
        with open("/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("0")  # in a namespace of its own the code could mount, and fill the memory


def _become(job: dict[str, Any], uid: int | None) -> NoReturn:
    """Become the code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.setsid()
    for name, limit in job["limits"].items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(number, (limit, limit))
    if uid is not None:
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    _prctl(_NO_NEW_PRIVS, 1)
    os.closerange(3, 4096)
    os.chdir("/tmp")
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
    os.execve(job["python"], [job["python"], "-I", "main.py"], environment)


def _wait(child: int) -> int:
    """Return the exit code of a child, and reap whatever else ends meanwhile."""
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _read_only(path: str) -> None:
    attributes = (ctypes.c_uint64 * 4)(
        1 | 2 | 4
    )  # read-only, no set-user-id, no devices; all mounts below too
    if _libc.syscall(_MOUNT_SETATTR, -100, path.encode(), 0x8000, attributes, ctypes.sizeof(attributes)) != 0:
        raise _error(f"mount_setattr {path}")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    arguments = [text and text.encode() for text in (source, target, kind)]
    if _libc.mount(*arguments, ctypes.c_ulong(flags), options.encode()) != 0:
        raise _error(f"mount {target}")


def _call(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        raise _error(name)


def _prctl(option: int, value: int) -> None:
    _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def _error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), call)


def _refuse(error: Exception) -> NoReturn:
    os.write(2, f"{error}\n".encode())
    os._exit(NO_JAIL)


if __name__ == "__main__":
    main()
