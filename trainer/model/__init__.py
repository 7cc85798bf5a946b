"""Load the policy into PyTorch, lay it out over ranks, compute logprobs; make the built-in model."""
