"""Launch the training job, talk to it, and run its ranks."""
