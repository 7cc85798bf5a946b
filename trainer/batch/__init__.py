"""From groups to tensors: selection, advantages, the batch, packing."""
