"""Functions in processes of their own, which may be killed: the pool, and rewards that use it."""
