"""`kvstore-server`, or `python -m kvstore_server`: one server. Its supervisor and its keygen do without torch."""

import os
import sys
from typing import NoReturn


def run() -> NoReturn:
    """Run the command line, and end the process."""
    if sys.argv[1:2] == ["keygen"]:
        from kvstore_server import keygen

        sys.exit(keygen.main(sys.argv[2:]))
    if "--supervise" in sys.argv[1:]:
        from kvstore_server import supervisor

        sys.exit(supervisor.main(sys.argv[1:], os.environ))
    from kvstore_server import cli

    cli.run_server_cli()


if __name__ == "__main__":
    run()
