"""Benchmark: time and memory of private gradients, compared with plain gradients and other libraries."""
