"""Let training jobs work with torch 2.11: Python runs this at its start, with its directory on PYTHONPATH."""

import sys
from importlib import import_module

TIMEOUT = "--shutdown-timeout"
"""An argument of torchrun's that torch 2.11 does not know."""

if TIMEOUT in sys.argv:
    at = sys.argv.index(TIMEOUT)
    del sys.argv[at : at + 2]
if "--spool" in sys.argv and "--log-dir" not in sys.argv:  # a rank, not the agent
    import_module("scripts.bench.torch_bridge")
