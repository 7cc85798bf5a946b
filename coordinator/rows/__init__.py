"""What each row of the protocol table does, and what rows share."""
