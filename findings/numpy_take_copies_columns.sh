#!/usr/bin/env bash
# Library:   numpy 2.4.6, numpy.take and ndarray.take of an array that is not contiguous, such as a field of a
#            structured array or a column of a matrix.
# Expected:  it reads the elements that it is asked for, as indexing with an array of indices does.
# Happens:   the whole array is first copied into a contiguous one, also for a single index: 800 MB for a field of
#            100 M records, whose pages nothing has touched before. column[indices] copies nothing.
# Seen:      2026-12-01
# For users: with a large table of records, `take` in place of indexing, which is faster for contiguous arrays, needs
#            memory and time for all of it with each call.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6
cat > "$folder/show.py" <<'PYTHON'
import resource
import sys

import numpy as np


def peak():
    """The most memory that this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


print("numpy", np.__version__)
records = np.zeros(100_000_000, [("row", np.int64), ("count", np.int64)])
column, index = records["row"], np.array([5])
begin = peak()
column[index]
indexed = peak()
column.take(index)
taken = peak()
print(f"column[index] needs {indexed - begin:.0f} MB more, column.take(index) {taken - indexed:.0f} MB more")
as_described = indexed - begin < 50 and taken - indexed > 700
print("as described" if as_described else "this has changed")
sys.exit(not as_described)
PYTHON
"$folder/env/bin/python" "$folder/show.py"
