"""Train: compute the loss, and take optimizer steps."""
