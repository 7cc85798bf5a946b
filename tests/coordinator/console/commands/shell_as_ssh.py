"""A shell of this machine in place of ssh, and a few words in place of a node."""

from pathlib import Path

from tests.bash import READY_TO_WAIT

SSH = """#!/bin/bash
while [ "$1" != -- ]; do shift; done
case $2 in down*) echo "ssh: connect to host $2 port 22: Connection refused" >&2; exit 255;; esac
case $2 in cut*) echo "flagpost: ready"; exec sleep 600;; esac
echo "Welcome to $2"
exec sh -c "$3"
"""
"""A client that goes nowhere: the hosts are this machine, some are down or cut off by their names."""


NODE = (
    f"#!/bin/bash\n{READY_TO_WAIT}"
    """
rank=0; [ "$1" = --worker ] && rank=$2
note() { echo "$1" >> "$PLACE/$rank"; }
trap 'note INT; [ -e "$PLACE/deaf" ] || exit 130' INT
trap 'note TERM; exit 130' TERM
note started
"""
)
"""How a node begins: it notes in the file of its rank what it hears, and ends at it."""


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path
