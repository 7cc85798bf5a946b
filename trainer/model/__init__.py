"""The policy as PyTorch computes it: loading, layouts, adapters, logprobs, the built-in model."""
