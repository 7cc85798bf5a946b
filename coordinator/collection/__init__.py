"""A node's share of the groups of a rollout: how it is made, and what with."""
