"""The commands beside `run`: each parses, then calls what does the work."""
