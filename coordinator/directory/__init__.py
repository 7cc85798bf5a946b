"""The shared directory: its layout, its calls with their retries, and what a run has published."""
