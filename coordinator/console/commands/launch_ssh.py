"""`run launch --hosts`: the machines are hosts that ssh reaches."""

import os
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from coordinator.console.commands.launch import RemoteNode, launch, refuse_parts, show
from coordinator.console.commands.ssh import RemoteProgram
from coordinator.settings.tree import SettingsError

SSH = "ssh"


def launch_ssh(
    hosts: str, root: Path, words: Sequence[str], ssh: str = SSH, program: str | None = None
) -> int:
    """Start a node on each host over ssh; returns and raises what `launch` does. `ssh`: a command with
    options.
    """
    refuse_parts(words)
    return launch(_Hosts(hosts, ssh), root, words, program)


class _Hosts:
    """The hosts of `--hosts`, in order of rank."""

    def __init__(self, hosts: str, ssh: str) -> None:
        self.names = _parse_hosts(hosts)
        self._client: list[str] = []
        self._ssh = ssh
        self.options = ["--hosts", hosts, *(["--ssh", ssh] * (ssh != SSH))]

    def connect(self, root: Path) -> None:
        """Look for the client; the hosts themselves answer once they are started."""
        self._client = _parse_client(self._ssh)

    def start(self, rank: int, command: Sequence[str]) -> RemoteNode:
        """Connect to the host of a rank."""
        host = self.names[rank]
        return RemoteProgram(f"rank {rank}, {host}", host, command, os.getcwd(), self._client, show)

    def close(self) -> None:
        """Nothing was taken."""


def _parse_client(ssh: str) -> list[str]:
    """Split --ssh into words; SettingsError if there is no such program."""
    try:
        words = shlex.split(ssh)
    except ValueError as error:
        raise SettingsError(f"--ssh '{ssh}': {error}") from None
    if not words or shutil.which(words[0]) is None:
        raise SettingsError(f"--ssh '{ssh}': no such program here; install an ssh client, or name one")
    return words


def _parse_hosts(hosts: str) -> list[str]:
    """Split --hosts, in order of rank; a host that is named twice gets two nodes."""
    names = [name.strip() for name in hosts.split(",")]
    for name in names:
        if not name or name.startswith("-") or len(name.split()) > 1:
            raise SettingsError(
                f"--hosts {hosts}: '{name}' is not a host; give what ssh takes, e.g. node-a,me@node-b"
            )
    return names
