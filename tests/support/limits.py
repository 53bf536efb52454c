"""How long tests wait: long enough that a busy machine makes them slower, never red."""

from __future__ import annotations

LIMIT = 300.0
"""Seconds after which what must happen counts as hanging."""
JOB_LIMIT = 1000.0
"""The same for a whole job of processes, which many tests share. Pytest's own limit in setup.cfg is above it."""
FOREVER = 3600.0
"""Seconds that nobody lives to see: what would wait or sleep so long has to be ended by something else."""
DEAD_AFTER = 3.0
"""Seconds of silence after which others are given up, in the tests that wait for it; elsewhere it is LIMIT."""
SOON = 0.5
"""Seconds of a deadline that a test expects to pass, and that nothing else in the test has to meet."""
