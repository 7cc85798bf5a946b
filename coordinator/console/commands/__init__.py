"""What a person types beside `run`: each command parses, then calls what does the work."""
