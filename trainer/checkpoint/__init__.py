"""What training writes: the model's directory, the trainer's state, the probe."""
