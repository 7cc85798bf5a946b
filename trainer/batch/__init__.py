"""Make tensors from groups, in this order: selection, advantages, building, batch, packing."""
