"""From what was typed to what a node starts with; what cannot work is refused here, in one line.

To read: `request` (what was typed), `start` (all of it in order), `last_settings`, `inputs` (what settings
name, loaded), `run_json`, `announcement`; beside them refusals and estimates, which `inputs` and `start` ask.
"""
