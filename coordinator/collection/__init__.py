"""How a node makes its share of the groups of a rollout, and what they are made with."""
