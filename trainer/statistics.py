"""The statistics of an optimizer step, by name. Torch-free."""

STATS = ("kl_engine", "clip_fraction", "kl_reference", "correction_fraction")
"""The statistics of trainer.update.loss.policy_loss, each a mean over tokens.

`kl_engine`: KL(engine || policy before the update), the k3 estimate. `clip_fraction`: the fraction of tokens
whose gradient the clip has cut off or (cispo) weakened. `kl_reference`: KL(policy || reference), the k3
estimate; 0 without a reference. `correction_fraction`: the fraction of tokens whose weight the correction
for the engine has cut or masked.
"""
SUMS = ("loss", *STATS, "entropy")
"""What a step adds up over its microbatches and ranks, in this order."""
