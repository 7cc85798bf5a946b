"""Nodes, phases and the shared directory. The only package that writes there; it never imports torch."""
