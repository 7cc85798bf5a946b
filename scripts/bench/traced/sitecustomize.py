"""Python runs this first in every process that has this directory on its PYTHONPATH: see tracing.py."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import tracing

tracing.begin()
sys.path.pop()
