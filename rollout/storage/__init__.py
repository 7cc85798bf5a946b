"""Read and write the shared directory, whose calls may fail for a moment. Every package writes there through
this room: files are written whole, read with retries, and hashed.
"""
