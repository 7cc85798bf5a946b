"""Try whole families: several at a time, each column in a process of its own."""

import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from scripts.models.columns import COLUMNS, vllm
from scripts.models.forked import forked, outcome
from scripts.tiny_models import make_tiny_model

REPOSITORY = Path(__file__).parents[2]
NO = "no: "
"""Before the reason, in a cell."""
Tried = dict[str, str] | str
"""The cells of a family by column, or why there is no model to try."""
Make = Callable[[str, Path], Path]


def try_all(
    families: Sequence[str], vllm_python: str | None, jobs: int, make: Make = make_tiny_model
) -> Iterator[tuple[str, Tried]]:
    """Yield each family with its cells, as they come; `jobs` families are tried at a time.

    `vllm_python`: an interpreter that has vLLM, if it is to be tried. `make` writes a model of a family.
    Progress goes to stderr.
    """
    waiting = list(families)
    running: dict[Any, tuple[str, Any, float]] = {}
    with tempfile.TemporaryDirectory(prefix="flagpost-models-") as temporary, contextlib.ExitStack() as stack:
        root = Path(temporary)
        server = stack.enter_context(_vllm_server(vllm_python, root)) if vllm_python else None
        while waiting or running:
            while waiting and len(running) < jobs:
                family = waiting.pop(0)
                pipe, process = forked(partial(try_family, family, root / family, server, make))
                running[pipe] = family, process, time.monotonic()
            ready: list[Any] = wait(list(running))
            for pipe in ready:
                family, process, started = running.pop(pipe)
                _done, found = pipe.recv()
                process.join()
                shutil.rmtree(root / family, ignore_errors=True)
                took = time.monotonic() - started
                left = len(waiting) + len(running)
                print(f"{family}: {found} ({took:.0f} s); {left} to go", file=sys.stderr, flush=True)
                yield family, found


def try_family(family: str, directory: Path, vllm_server: Path | None, make: Make = make_tiny_model) -> Tried:
    """Make a model of the family in `directory` and try it, in vLLM too if `vllm_server` is its socket."""
    done, said = outcome(partial(make, family, directory))
    if not done:
        return said
    columns = COLUMNS | ({"vLLM": partial(vllm, server=vllm_server)} if vllm_server else {})
    cells: dict[str, str] = {}
    for name, column in columns.items():
        done, said = outcome(partial(column, directory))
        if name == "rows" and "train a causal decoder" in said:
            return said
        cells[name] = said if done else NO + said.replace(f"{directory}: ", "")
    return cells


@contextlib.contextmanager
def _vllm_server(python: str, directory: Path) -> Iterator[Path]:
    """Run scripts.models.vllm_server with the interpreter; yields its socket."""
    path = directory / "vllm.sock"
    command = [python, "-W", "ignore", "-m", "scripts.models.vllm_server", str(path)]
    with (directory / "vllm.log").open("wb") as log:
        server = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=log, stderr=log)
    try:
        while not path.exists():
            if server.poll() is not None:
                raise SystemExit(f"--vllm {python}: {(directory / 'vllm.log').read_text()[-2000:]}")
            time.sleep(0.1)
        yield path
    finally:
        server.communicate()  # the end of its input ends it
