"""Files on a filesystem that may fail for a moment: written whole, read with retries, hashed."""
