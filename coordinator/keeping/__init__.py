"""Keep checkpoints, states and trajectories, and find where a run goes on from them."""
