"""A node: how it joins, where it is, what it says with flags, and what ends its work."""
