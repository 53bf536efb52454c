"""Strategies that are closed at the end of a test."""

from tests.support.strategies import make

__all__ = ["make"]
