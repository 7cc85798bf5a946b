"""Tasks to trajectories.

Knows engines, environments and rewards; knows nothing of nodes or the shared directory.
"""
