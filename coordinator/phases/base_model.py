"""The built-in model: the master makes it once for a run directory, and keeps it in the user's cache."""

import hashlib
import importlib.util
import logging
import os
import time
from pathlib import Path

from filelock import Timeout

from coordinator.directory import published
from coordinator.machine.host_lock import if_stale, link_in_utf8, lock_of, own_folder
from coordinator.node.node import Node
from coordinator.protocol.exits import Exit, NodeEnded
from coordinator.protocol.snapshot import Board
from rollout.environment_variables import cores
from rollout.settings import TINY
from rollout.storage import files
from rollout.tasks.task_set import BUILT_IN, SHAPES

log = logging.getLogger(__name__)

BUILD_TIMEOUT_S = 1800.0


def prepare_base_model(node: Node) -> None:
    """Make base_model/ in the run directory, if the run starts from the built-in model."""
    target = node.run_dir.base_model
    if node.settings.model != TINY or target.name in published.names(node.run_dir.root):
        return
    if node.run_dir.crew == "train":  # the other crew makes it; this one needs it later

        def is_there(_board: Board) -> bool | None:
            return target.name in published.names(node.run_dir.root) or None

        node.watch.wait(is_there, node.check, lambda: "the rollout crew to make the built-in model")
        return
    cached = _from_cache(node)
    staging = target.with_name(f".{target.name}.n{node.watch.incarnation}")
    files.remove_tree(staging)
    files.make_directory(staging)
    for file in sorted(cached.iterdir()):
        files.publish(staging / file.name, file.read_bytes())
    try:
        files.rename(staging, target)
    except OSError:
        if target.name not in published.names(node.run_dir.root):
            raise
        files.remove_tree(staging)  # another process of this rank was faster


def _from_cache(node: Node) -> Path:
    """Return the model in the cache; one process of this machine at a time builds it there."""
    steps, seed = node.settings.tiny.warmup_steps, node.settings.rollout.seed
    # What it is taught; a user's own tasks have no lesson.
    tasks = node.settings.tasks if node.settings.tasks in BUILT_IN else next(iter(BUILT_IN))
    name = f"tiny-{_recipe(tasks)}-{tasks.removeprefix('builtin:')}-seed{seed}-steps{steps}"
    try:
        root = link_in_utf8(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")) / "flagpost"
        root.mkdir(parents=True, exist_ok=True)
        if not os.access(root, os.W_OK):
            if (root / name).is_dir():
                return root / name
            raise PermissionError(f"{root} cannot be written")
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home at all
        root = own_folder("models")
        log.info("no cache (%s): keeping the built-in model in %s", error, root)
    model = root / name
    lock = lock_of(model.with_suffix(".lock"))
    deadline_s = time.monotonic() + BUILD_TIMEOUT_S
    while time.monotonic() < deadline_s:
        node.check()
        try:
            with lock.acquire(timeout=0.5):
                if not model.is_dir():
                    _build(node, model, tasks, seed, steps)
                return model
        except Timeout:
            continue
    text = f"another process builds {model} and does not end; end it{if_stale(lock)}"
    raise NodeEnded(Exit.FAILED, text, "failed")


def _build(node: Node, target: Path, tasks: str, seed: int, steps: int) -> None:
    log.info("making the built-in model: %d warm-up steps, once for this seed", steps)
    argv = [
        node.children.python,
        "-P",
        "-m",
        _program(tasks),
        *("--tasks", tasks),
        *("--seed", str(seed)),
        *("--steps", str(steps)),
        *("--out", str(target)),
    ]
    path = node.run_dir.logs(node.rank) / "base_model.log"
    env = {"OMP_NUM_THREADS": str(cores())}  # it runs alone, whatever the nodes share later
    child = node.children.start("base-model", argv, env=env, log=path, echo=_echo)
    while child.wait(0.2) is None:
        node.check()
    if child.poll() != 0 or not target.is_dir():
        raise NodeEnded(Exit.FAILED, f"the built-in model could not be made:\n{child.tail(20)}", "failed")


def _program(tasks: str) -> str:
    """Return the module that makes the model for a built-in set of tasks."""
    return "trainer.model.tiny_seeing" if tasks == SHAPES else "trainer.model.tiny"


def _recipe(tasks: str) -> str:
    """Return a digest of the program that makes the model: another recipe is another model."""
    spec = importlib.util.find_spec(_program(tasks))
    assert spec is not None and spec.origin is not None
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()[:8]


def _echo(line: str) -> None:
    if line.startswith("warm-up"):
        log.info("%s", line)
