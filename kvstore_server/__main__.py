"""`python -m kvstore_server` is the same as `kvstore-server`."""

import sys

from kvstore_server.cli import main

sys.exit(main())
