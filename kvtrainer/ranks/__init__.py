"""Collectives between the ranks of torch.distributed, over shared memory where ranks are on one host."""
