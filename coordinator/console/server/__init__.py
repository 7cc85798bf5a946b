"""`run serve`: jobs over HTTP. All that it knows is in the directories of its jobs."""
