"""Measure what checkpoints of a large model cost: bytes, memory and seconds of nodes on this machine.

    .venv/bin/python scripts/bench/large.py [--parameters 4e8] [--nodes 2] [--iterations 3] [--directory /tmp]

Makes a random Qwen3 and trains it for a few iterations with few tokens, sharded over the nodes (FSDP2 over
gloo), with the embedded engine. Then the same command once more, for one further iteration: a restart. Prints
one JSON line. `gb_read` and `gb_written`: what each kind of process has passed through read and write calls
(rchar and wchar of /proc/PID/io), an iteration after the first; maps of files are not counted.
`peak_gb`: of one process, its own memory (RssAnon, sampled) and all of it, mapped files included (VmHWM).
It needs about 35 bytes of memory and, an iteration, 16 bytes of disk for each parameter, and Linux.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

SAMPLE_S = 0.1
KINDS = {"coordinator.cli": "node", "-m trainer ": "trainer", "torch_server": "engine", "embedded": "engine"}
LAYER = 12 * 1024 * 1024
"""Parameters of one layer, about."""


def make_model(path: Path, parameters: float) -> int:
    """Make a random model of about so many parameters; returns how many it has."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from trainer.model.tiny import make_tokenizer

    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=max(1, round(parameters / LAYER)),
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        dtype=torch.bfloat16,
    )
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return sum(parameter.numel() for parameter in model.parameters())


class Watcher:
    """Follows a process and all that it starts: bytes and memory of each, by kind and node."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[int, str]] = {}
        self.io: dict[tuple[int, str], dict[int, tuple[int, int]]] = defaultdict(dict)
        self.own: dict[tuple[int, str], int] = defaultdict(int)
        self.all: dict[tuple[int, str], int] = defaultdict(int)

    def follow(self, pids: list[int]) -> None:
        """Look once at each process."""
        for pid in pids:
            with suppress(FileNotFoundError, ProcessLookupError, PermissionError, IndexError):
                command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                status = Path(f"/proc/{pid}/status").read_text()
                io = Path(f"/proc/{pid}/io").read_text()
                parent = self._of.get(int(_number(status, "PPid")), (-1, ""))[0]
                rank = re.search(r"--worker (\d+)", command)
                node = int(rank[1]) if rank else 0 if "--master" in command else parent
                kind = next((kind for word, kind in KINDS.items() if word in command), "other")
                self._of[pid] = (node, kind)
                if node < 0:
                    continue
                self.io[node, kind][pid] = (_number(io, "rchar"), _number(io, "wchar"))
                self.own[node, kind] = max(self.own[node, kind], _number(status, "RssAnon"))
                self.all[node, kind] = max(self.all[node, kind], _number(status, "VmHWM"))

    def bytes(self) -> dict[tuple[int, str], tuple[int, int]]:
        """Return what has been read and written so far, by node and kind."""
        return {
            key: (sum(read for read, _ in of.values()), sum(wrote for _, wrote in of.values()))
            for key, of in self.io.items()
        }


def _number(text: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else 0


def descendants(pid: int) -> Iterator[int]:
    """Yield the process and all below it."""
    yield pid
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
                yield from descendants(int(child))


def turn(argv: list[str], watcher: Watcher, look: Callable[[], None]) -> float:
    """Run to the end while the watcher follows; returns the seconds."""
    began_s = time.monotonic()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(argv, stdout=said, stderr=subprocess.STDOUT)
        while process.poll() is None:
            watcher.follow(list(descendants(process.pid)))
            look()
            time.sleep(SAMPLE_S)
        if process.returncode:
            said.seek(0)
            raise SystemExit(f"{' '.join(argv)}\n{said.read()[-4000:]}")
    return time.monotonic() - began_s


def measure(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Run, and return the line."""
    model, root = directory / "model", directory / "run"
    parameters = make_model(model, options.parameters)
    settings = {
        "rollout.tasks_per_iteration": 4,
        "rollout.samples_per_task": 2,
        "rollout.max_tokens": 4,
        "trainer.global_batch_size": 8,
        "trainer.layout": "sharded",
        "trainer.save_dtype": "bfloat16",
        "trainer.keep_flat_groups": True,
        "trainer.advantage": "one",  # a random model earns nothing, but has to take steps
        "trainer.engine_correction": "off",
        "engine.probe_tolerance": 10,
        "eval.interval": 0,
        "checkpoints.keep_last": 2,
    }
    argv = [sys.executable, "-m", "coordinator.cli", "local", "--num-nodes", str(options.nodes)]
    argv += ["--engine", "torch", "--log-path", str(root), "--model", str(model)]
    argv += [*(f"{name}={value}" for name, value in settings.items()), *options.settings]
    lines: list[dict[str, Any]] = []
    marks: list[dict[tuple[int, str], tuple[int, int]]] = []

    def look() -> None:
        file = root / "metrics.jsonl"
        there = file.read_text().splitlines() if file.exists() else []
        if len(there) > len(lines):  # before the processes end: a parent is charged for its dead children
            marks.append(watcher.bytes())
        lines[:] = [json.loads(line) for line in there]

    watcher = Watcher()
    seconds = turn([*argv, "--iterations", str(options.iterations)], watcher, look)
    first = watcher
    steady = marks[options.iterations - 1], marks[0]
    watcher = Watcher()
    restart_s = turn([*argv, "--iterations", str(options.iterations + 1)], watcher, look)
    count = options.iterations - 1
    before = [line for line in lines[1 : options.iterations]]
    return {
        "parameters": parameters,
        "nodes": options.nodes,
        "seconds": round(seconds, 1),
        "gb_an_iteration": _gb_between(*steady, count),
        "peak_gb": _peaks(first),
        "rows_s": {
            name: round(sum(line["phase_seconds"].get(name, 0.0) for line in before) / count, 2)
            for name in before[0]["phase_seconds"]
        },
        "first_rows_s": lines[0]["phase_seconds"],
        "restart": {
            "seconds": round(restart_s, 1),
            "gb": _gb_between(marks[-1], {}, 1),
            "peak_gb": _peaks(watcher),
            "rows_s": lines[-1]["phase_seconds"],
        },
    }


def _gb_between(after: dict[Any, tuple[int, int]], before: dict[Any, tuple[int, int]], count: int) -> Any:
    """Return read and written gigabytes an iteration, by node and kind."""
    found: dict[str, Any] = {}
    for (node, kind), (read, wrote) in sorted(after.items()):
        if kind == "other":
            continue
        earlier = before.get((node, kind), (0, 0))
        values = [
            round((now - then) / count / 1e9, 2) for now, then in zip((read, wrote), earlier, strict=True)
        ]
        found[f"{kind} {node}"] = {"read": values[0], "written": values[1]}
    return found


def _peaks(watcher: Watcher) -> dict[str, Any]:
    return {
        f"{kind} {node}": {"own": round(kb / 1e6, 2), "all": round(watcher.all[node, kind] / 1e6, 2)}
        for (node, kind), kb in sorted(watcher.own.items())
        if kind != "other"
    }


def main() -> None:
    """Read the options, measure, and print the line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, default=Path("/tmp"), help="on a local disk; default: /tmp")
    parser.add_argument("--parameters", type=float, default=4e8)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=3, help="before the restart; at least 2")
    parser.add_argument("--settings", nargs="*", default=[], help="further key=value")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="flagpost-bench-", dir=options.directory) as directory:
        print(json.dumps(measure(options, Path(directory))))


if __name__ == "__main__":
    main()
