"""The kinds of engines, a file each; `choice` picks one. None of them imports a server."""
