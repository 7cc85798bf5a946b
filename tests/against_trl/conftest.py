"""Tests that need TRL; `make test-trl` runs them."""

from importlib.util import find_spec

collect_ignore = (
    [] if find_spec("trl") else ["test_losses.py", "test_migration_names.py", "test_templates.py"]
)
