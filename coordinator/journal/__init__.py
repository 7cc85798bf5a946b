"""What a node writes down of itself: events, logs, and metrics for trackers."""
