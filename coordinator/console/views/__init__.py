"""Views of a run for people: the Python API, the status, the live terminal, logs, the report."""
