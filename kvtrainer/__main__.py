"""`python -m kvtrainer` is the same as `kvlaunch`."""

import sys

from kvtrainer.launch import main

sys.exit(main())
