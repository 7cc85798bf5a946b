"""The statistics of an optimizer step, by name. Torch-free."""

STATS = ("kl_engine", "clip_fraction", "kl_reference", "correction_fraction", "weight", "weight_squared")
"""The statistics of trainer.update.loss.policy_loss, each a mean over tokens.

`kl_engine`: KL(engine || policy before the update), the k3 estimate. `clip_fraction`: the fraction of tokens
whose gradient the clip has cut off or (cispo) weakened. `kl_reference`: KL(policy || reference), the k3
estimate; 0 without a reference. `correction_fraction`: the fraction of tokens whose weight the correction
for the engine has cut or masked. `weight`, `weight_squared`: w = pi_old / mu before the correction cuts it,
and w squared: their means say how many samples of the policy itself the tokens are worth.
"""
WEIGHTS = ("weight", "weight_squared")
BY_SOURCE = ("loss", "kl_engine", "kl_reference", "entropy")
"""What is measured for each source of tasks too, as means over its trained tokens."""
SUMS = ("loss", *STATS, "entropy")
"""What a step adds up over its microbatches and ranks, in this order."""
