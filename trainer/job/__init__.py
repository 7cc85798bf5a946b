"""Launch the training job, talk to it, and run its ranks.

To read: `launch` begins on the node, `agent` starts the ranks of a machine, and `rank` trains; beside them
`rendezvous` (how ranks meet), `doorbell` (a request has come), `forks` (quick starts) and `profile`.
"""
