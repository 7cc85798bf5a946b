"""The loss, and one optimizer step."""
