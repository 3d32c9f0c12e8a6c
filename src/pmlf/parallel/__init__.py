"""Several processes that take one private step together (`torch.distributed`)."""
