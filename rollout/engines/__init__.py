"""Engines: the client of a server, its administration, its command line, directories of weights."""
