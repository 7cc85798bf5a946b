"""The training job: its launch, its ranks, how a node talks to them."""
