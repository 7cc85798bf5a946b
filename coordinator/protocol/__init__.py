"""The nodes that are there and what they have said; decisions from that are pure functions."""
