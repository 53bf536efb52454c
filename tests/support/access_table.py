"""Make the table of messages and roles in docs/security.md.

python -m tests.support.access_table
"""

from __future__ import annotations

from kvstore_server.access import ALLOWED
from kvstore_server.keys import Role


def rows() -> list[str]:
    roles = (Role.OBSERVER, Role.WORKER, Role.ADMIN)
    return [
        f"| `{kind.__name__}` | {' | '.join('yes' if role in allowed else 'no' for role in roles)} |"
        for kind, allowed in sorted(ALLOWED.items(), key=lambda item: item[0].__name__)
    ]


if __name__ == "__main__":
    print("\n".join(rows()))
