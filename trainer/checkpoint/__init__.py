"""Write and load what training makes: the model's directory, the trainer's state, the probe."""
