"""Who is there and what they have said; decisions from that are pure functions."""
