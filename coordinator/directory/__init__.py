"""The shared directory: its layout, its calls with their retries, and what a run has published.

To read: `layout` (every path), `file_names` (the names in protocol/ and claims/), `parts` and `manifests`
(trajectories), `published` (policies, metrics), `claims`; beside them work in threads and old figures.
"""
