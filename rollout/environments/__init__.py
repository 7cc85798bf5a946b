"""Environments: what turns a task into samples, in one turn or many."""
