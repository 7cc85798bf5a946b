"""A node that gives user code two seconds to react.

python -m tests.cluster.impatient_node ARGUMENTS OF run
"""

import sys

from coordinator import cli
from coordinator.node import unresponsive

if __name__ == "__main__":
    unresponsive.REACT_S = 2.0
    sys.exit(cli.main())
