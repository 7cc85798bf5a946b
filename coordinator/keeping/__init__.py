"""What a run keeps of checkpoints, states and trajectories, and where it goes on from them."""
