"""Engines: the client, the administration of a server, its command line, model directories."""
