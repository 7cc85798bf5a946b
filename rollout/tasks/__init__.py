"""Where tasks come from, and which of them an iteration draws."""
