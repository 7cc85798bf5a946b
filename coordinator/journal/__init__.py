"""A node's records of itself: events, logs, and metrics for trackers.

To read: `events`, `logs` with `progress_reminder`, `tracker_feed` with `tracker_kinds`; `streams` for what is
printed.
"""
