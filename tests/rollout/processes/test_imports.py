"""Imports without the collection of garbage."""

import gc
import subprocess
import sys

import pytest

from rollout.processes.imports import importing

SEEN = """
import gc, weakref
from rollout.processes.imports import importing

collections = []
gc.callbacks.append(lambda phase, _: collections.append(phase))

class Node:
    pass

with importing():
    import json.decoder, xml.dom.minidom, sqlite3, asyncio, unittest.mock
print(len(collections), gc.isenabled(), gc.get_freeze_count() > 0)
node = Node()
node.me, gone = node, weakref.ref(node)
del node
gc.collect()
print(gone() is None)
"""


def test_nothing_is_collected_while_modules_are_imported_and_cycles_are_afterwards() -> None:
    command = [sys.executable, "-c", SEEN]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.splitlines() == ["0 True True", "True"]


def test_import_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError), importing():
        import there_is_no_such_module  # noqa: F401  # pyright: ignore
    gc.unfreeze()  # what the tests before have left is collected later too
    assert gc.isenabled()
