"""Optimizer state in its forms, and the file of it."""
