"""A node: how it joins, where it is, what it says with flags, and what ends its work.

To read: `node` (its parts), `identity`, `gathering` (the master brings all into an epoch), `pending` (the
others wait for that), `flags`, `phase_endings`, `position` (for heartbeats), `policies`; beside them what a
node does about outages, guests, the other crew.
"""
