"""Ties to other libraries, each an optional extra; nothing here is imported by the rest of the package."""
