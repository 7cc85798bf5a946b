"""From what was typed to what a node starts with; what cannot work is refused here, in one line."""
