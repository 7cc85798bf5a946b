"""Code that nobody has read: run in a jail, without network, within limits."""
