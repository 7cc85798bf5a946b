"""`run` in a fork of the test process, which has imported what a process of its own would import first."""

import atexit
import gc
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile

from coordinator.cli import main


def run_forked(
    arguments: Sequence[str], cwd: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Return the end of `run` with these arguments, in that directory and environment."""
    with TemporaryFile() as out, TemporaryFile() as err:
        gc.freeze()
        if (pid := os.fork()) == 0:
            _become_run(arguments, cwd, environment, out.fileno(), err.fileno())
        gc.unfreeze()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(
            ["run", *arguments], code, out.read().decode(), err.read().decode()
        )


def _become_run(
    arguments: Sequence[str], cwd: Path, environment: Mapping[str, str], out: int, err: int
) -> None:
    """End this process as `run` would."""
    code: object = 1
    try:
        atexit._clear()  # what is to be done at the end of the test process
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
        warnings.resetwarnings()
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(cwd)
        sys.argv, sys.path = ["run", *arguments], [str(cwd), *sys.path]
        code = main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)
