"""The protocol table, and what each of its phases does."""
