"""The nodes that are there and what they have said; decisions from that are pure functions.

To read: `phase` (the 14 phases), `records` (an epoch), `snapshot` (a listing), `verdict` (what it means for a
node), `judge` (who is silent or stands still, by `liveness`), `watch` (the thread that beats, lists and has
it judged; `fence` guards it), `on_node_failure`, `exits`; for rollouts `split_slots` and `chunks`.
"""
