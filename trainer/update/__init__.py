"""Train: `step` takes the optimizer steps; `loss` is what it minimises, `kl_reward` and `preferences` change
the advantages before.
"""
