"""The nodes that are there and what they have said; decisions from that are pure functions.

To read: `phase` (the 14 phases), `records` (an epoch), `snapshot` (a listing), `verdict` (what it means for a
node), `watch` (the thread that beats, lists and judges, by `liveness` and `fence`), `on_node_failure`,
`exits`; for rollouts `split_slots` and `chunks`.
"""
