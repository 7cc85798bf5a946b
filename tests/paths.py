"""Where the repository is, for tests that read its files or run its programs."""

from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
