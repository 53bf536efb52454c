"""`python -m kvtrainer` is the same as `kvlaunch`."""

import sys

from kvtrainer.jobs.kvlaunch import main

sys.exit(main())
