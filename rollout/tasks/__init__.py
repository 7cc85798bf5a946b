"""Sources of tasks, and the choice of those that an iteration draws.

To read: `task_set` (what a run has), `read_rows` and `fields` (from a file), `sampling` (what is drawn);
beside them sources that other libraries make.
"""
