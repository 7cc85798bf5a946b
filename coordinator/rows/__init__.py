"""The protocol table, and what each of its rows does."""
