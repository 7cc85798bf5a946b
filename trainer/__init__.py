"""Trajectories to a checkpoint. Reads trajectories, writes into a directory that it is given."""
