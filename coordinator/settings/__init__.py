"""The settings of a run: their classes, and how they are built from what was typed."""
