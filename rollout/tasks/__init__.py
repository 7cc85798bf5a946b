"""Sources of tasks, and the choice of those that an iteration draws."""
