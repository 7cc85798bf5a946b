"""Engines: the client of a server, its administration, its command line, directories of weights.

To read: `completion` (what is generated), `client` (which asks for it), `admin` (loads weights, and with
`content` proves them), `kinds.kind` (what a kind of engine is), `embedded.server` (one of them).
"""
