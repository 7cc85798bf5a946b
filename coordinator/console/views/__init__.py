"""What a person reads of a run: the Python API, the status, the live terminal, logs, the report."""
