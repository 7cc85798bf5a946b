"""Rewards: the built-in ones, and those that run in processes of their own."""
