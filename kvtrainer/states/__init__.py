"""Saved states of optimizers: what is in a file, and how files are written."""
