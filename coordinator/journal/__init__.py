"""A node's records of itself: events, logs, and metrics for trackers."""
