"""What servers of `recovery.py` load with --import, which is the last thing before they look for their state."""

from __future__ import annotations

from recovery_marks import mark_start

mark_start("server")
