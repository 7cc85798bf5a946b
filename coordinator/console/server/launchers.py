"""Launch a job by a command line, which ends when the run has ended; and cancel it."""

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.machine.run_command import run_command
from coordinator.settings.tree import SettingsError

KINDS = ("local", "ssh", "slurm", "ray")
SBATCH = Path(__file__).parents[3] / "scripts" / "node.sbatch"


@dataclass(frozen=True)
class Launcher:
    """Where the nodes of jobs run: `local` on this machine, `ssh` on `hosts`, `slurm` by `script`, `ray` at
    `address`.
    """

    kind: str = "local"
    hosts: str = ""
    script: Path = SBATCH
    address: str = "auto"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise SettingsError(f"--launcher {self.kind}: there is {', '.join(KINDS)}")
        if (self.kind == "ssh") != bool(self.hosts):
            raise SettingsError("--launcher ssh and --hosts A,B,C go together; give both or neither")
        if self.kind == "slurm" and not (shutil.which("sbatch") and self.script.is_file()):
            raise SettingsError(
                f"--launcher slurm needs sbatch on the PATH, and the script {self.script}: name another one "
                "with --sbatch FILE"
            )

    @property
    def decided(self) -> list[str]:
        """Options that the launcher gives by itself, as far as they bear on what a client may give."""
        return ["--num-nodes", str(len(self.hosts.split(",")))] if self.kind == "ssh" else []

    def refuse(self, options: Sequence[str]) -> None:
        """Raise SettingsError for an option of a job that the launcher decides."""
        for option in options if self.decided else ():
            if option.partition("=")[0].strip() in {"--num-nodes", "cluster.num_nodes"}:
                raise SettingsError(f"leave {option} out: the server has a node on each of {self.hosts}")

    def command(self, log_path: Path, options: Sequence[str], output: Path) -> list[str]:
        """Return the command that starts the nodes of a job, and goes on as long as they do; it prints to
        `output`.
        """
        words = ["--log-path", str(log_path), *options]
        match self.kind:
            case "ssh":
                return run_command("launch", "--hosts", self.hosts, *words)
            case "ray":
                return run_command("launch", "--ray", self.address, *words)
            case "slurm":
                options_of_job = [f"--job-name={_slurm_name(log_path)}", f"--output={output}"]
                return ["sbatch", "--wait", *options_of_job, str(self.script), *words]
            case _:
                return run_command("local", *words)

    def cancel(self, log_path: Path) -> list[str]:
        """Return the command that ends the nodes where a signal does not; empty: a signal does."""
        return ["scancel", "--me", f"--name={_slurm_name(log_path)}"] if self.kind == "slurm" else []


def _slurm_name(log_path: Path) -> str:
    """Return the name of a job in Slurm, which no job of another server has."""
    return f"flagpost-{log_path.name}-{hashlib.sha256(str(log_path).encode()).hexdigest()[:8]}"
