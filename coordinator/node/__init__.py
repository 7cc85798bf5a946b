"""A node: how it starts and joins, where it is, what it says with flags, and what ends its work."""
