"""Make tensors from groups: select samples, compute advantages, build the batch, pack it."""
