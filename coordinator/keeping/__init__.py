"""Keep checkpoints, states and trajectories, and find where a run goes on from them.

To read: `resume` and `policy_choice` (where a run goes on, and from what), then `old_checkpoints`,
`trainer_states` and `old_trajectories` (what stays; the later ones hang on the earlier).
"""
