"""How each filesystem is served and mounted, in namespaces where nothing else runs.

Each function starts a server that keeps its data below `folder`, mounts it once at each path of `clients`,
and returns. It stops and unmounts nothing: the kernel does that when the namespaces end. Clients have the
options that a user would give first, that is hardly any.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ADDRESS = "10.77.0.1"
"""Where servers listen. GlusterFS and MooseFS refuse 127.0.0.1; this one is only in their namespace."""
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Filesystem:
    """A kind of filesystem: how to serve and mount it, and what that needs."""

    mount: Callable[[Path, Sequence[Path]], None]
    needs: Mapping[str, str]
    """Programs, each with Debian's package of it; the first tells the version."""


def local_disk(folder: Path, clients: Sequence[Path]) -> None:
    """One directory of this machine, for comparison."""
    for path in clients:
        run("mount", "--bind", str(made(folder / "data")), str(path))


def sshfs(folder: Path, clients: Sequence[Path], *options: str) -> None:
    """One sshd with keys of its own, which serves `folder`/data to clients with the default caches (20 s)."""
    for key in ("host", "user"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
    config = [
        f"ListenAddress {ADDRESS}",
        f"HostKey {folder}/host",
        f"AuthorizedKeysFile {folder}/user.pub",
        *("PidFile none", "StrictModes no", "UsePAM no", "PasswordAuthentication no", "PermitRootLogin yes"),
        "Subsystem sftp internal-sftp",
    ]
    (folder / "sshd_config").write_text("\n".join(config) + "\n")
    (folder / "known_hosts").write_text(f"{ADDRESS} {(folder / 'host.pub').read_text()}")
    hide("/run")
    Path("/run/sshd").mkdir(mode=0o755)  # sshd wants to see it
    start(str(shutil.which("sshd")), "-D", "-f", str(folder / "sshd_config"))
    until_answers(22)
    for path in clients:
        ssh = [f"IdentityFile={folder}/user", f"UserKnownHostsFile={folder}/known_hosts"]
        given = [word for option in (*ssh, *options) for word in ("-o", option)]
        run("sshfs", *given, "-F", "/dev/null", f"{ADDRESS}:{made(folder / 'data')}", str(path))


def sshfs_uncached(folder: Path, clients: Sequence[Path]) -> None:
    """The same without the clients' caches of names and attributes."""
    sshfs(folder, clients, "dir_cache=no", "entry_timeout=0", "attr_timeout=0")


def glusterfs(folder: Path, clients: Sequence[Path]) -> None:
    """A volume of one brick."""
    for place in ("/run", "/var/lib/glusterd", "/var/log/glusterfs"):
        hide(place)
    Path("/run/gluster").mkdir()
    matching = ("unshare", "--mount-proc")  # without their own entry in /proc its programs crash
    start(*matching, "glusterd", "--no-daemon")
    until_answers(24007)
    gluster = (*matching, "gluster", "--mode=script")
    run(*gluster, "volume", "create", "shared", f"{ADDRESS}:{folder}/data", "force")
    run(*gluster, "volume", "start", "shared")
    for path in clients:
        run("glusterfs", f"--volfile-server={ADDRESS}", "--volfile-id=shared", str(path))


def moosefs(folder: Path, clients: Sequence[Path]) -> None:
    """A master and one chunk server."""
    hide("/run")
    etc, data = made(folder / "etc"), made(folder / "data")
    given = f"WORKING_USER = root\nWORKING_GROUP = root\nDATA_PATH = {made(folder / 'state')}\n"
    (etc / "exports").write_text("* / rw,alldirs,admin,maproot=0:0\n* . rw\n")
    (etc / "master").write_text(f"{given}EXPORTS_FILENAME = {etc}/exports\nNICE_LEVEL = 0\n")
    (folder / "state" / "metadata.mfs").write_text("MFSM NEW")  # what Debian ships as metadata.mfs.empty
    (etc / "disks").write_text(f"{data}\n")
    (etc / "chunkserver").write_text(
        f"{given}MASTER_HOST = {ADDRESS}\nHDD_CONF_FILENAME = {etc}/disks\nNICE_LEVEL = 0\n"
    )
    start("mfsmaster", "-f", "-c", f"{etc}/master", "start")
    until_answers(9421)
    start("mfschunkserver", "-f", "-c", f"{etc}/chunkserver", "start")
    until_answers(9422)
    for path in clients:
        run("mfsmount", "-H", ADDRESS, "-o", "mfsnice=0", str(path))


def nfs(folder: Path, clients: Sequence[Path]) -> None:
    """nfs-ganesha with NFS 3, and clients in user space that remember nothing."""
    for place in ("/run", "/var/lib/nfs", "/var/log/ganesha"):
        hide(place)
    made(Path("/run/ganesha"))
    (folder / "ganesha.conf").write_text(
        "NFS_CORE_PARAM { Protocols = 3; Enable_NLM = false; Enable_RQUOTA = false; }\n"
        f'EXPORT {{ Export_Id = 1; Path = "{made(folder / "data")}"; Pseudo = "/shared"; Access_Type = RW;\n'
        "  Squash = No_Root_Squash; SecType = sys; FSAL { Name = VFS; } }\n"
    )
    start("rpcbind", "-f")
    until(Path("/run/rpcbind.sock").exists, "rpcbind listens")
    start("ganesha.nfsd", "-F", "-L", "/dev/stderr", "-f", str(folder / "ganesha.conf"))
    until_answers(2049)
    for path in clients:
        start(
            sys.executable, "-m", "tests.filesystems.nfs_client", f"nfs://{ADDRESS}{folder}/data", str(path)
        )
    for path in clients:
        until(lambda: os.path.ismount(path), f"{path} is mounted")  # noqa: B023


def run(*command: str) -> None:
    """Run a command to its end; RuntimeError with what it said if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` ended with {done.returncode}: {done.stdout}{done.stderr}")


def start(*command: str) -> None:
    """Start a server; what it says goes to the log."""
    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)


def until_answers(port: int) -> None:
    """Wait for a server."""

    def answers() -> bool:
        with socket.socket() as door:
            return door.connect_ex((ADDRESS, port)) == 0

    until(answers, f"something listens on port {port}")


def until(ready: Callable[[], bool], what: str) -> None:
    """Poll until `ready()`."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not ready():
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"not within {PATIENCE_S:.0f} s: {what}")
        time.sleep(0.05)


def hide(place: str) -> None:
    """Lay an empty directory over one of the machine's."""
    if os.path.isdir(place):
        run("mount", "-t", "tmpfs", "tmpfs", place)


def made(folder: Path) -> Path:
    """Return a folder that is there."""
    folder.mkdir(exist_ok=True)
    return folder


SSHFS = {"sshfs": "sshfs", "sshd": "openssh-server"}
FILESYSTEMS = {
    "local disk": Filesystem(local_disk, {"mount": "mount"}),
    "sshfs": Filesystem(sshfs, SSHFS),
    "sshfs, caches off": Filesystem(sshfs_uncached, SSHFS),
    "glusterfs": Filesystem(glusterfs, {"glusterd": "glusterfs-server", "glusterfs": "glusterfs-client"}),
    "moosefs": Filesystem(
        moosefs,
        {
            "mfsmaster": "moosefs-master",
            "mfschunkserver": "moosefs-chunkserver",
            "mfsmount": "moosefs-client",
        },
    ),
    "nfs": Filesystem(
        nfs, {"ganesha.nfsd": "nfs-ganesha-vfs", "rpcbind": "rpcbind", "nfs-ls": "libnfs-utils"}
    ),
}
