#!/usr/bin/env bash
# Library:   PyTorch 2.13.0 with NumPy 2.4.6, on 64-bit Linux: torch.from_numpy.
# Expected:  arrays of equal dtype are converted alike: torch has a uint64, so it takes arrays whose dtype is uint64.
# Happens:   NumPy has two types of 64 unsigned bits, whose dtypes compare as equal. torch takes the one that the name
#            "uint64" means, and raises TypeError for the other, which NumPy chooses for a list of numbers from 2**63 on.
# Seen:      2026-11-30
# For users: ids that are hashes of 64 bits, in a list, fail until the array is viewed as int64 (or made with dtype).
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6

cat > "$place/run.py" <<'PYTHON'
import numpy as np
import torch


def taken(array):
    try:
        return str(torch.from_numpy(array).dtype)
    except TypeError as error:
        return f"TypeError: {str(error).partition('. ')[0]}"


ids = [2**64 - 1, 2**63]
listed, named = np.array(ids), np.array(ids, dtype=np.uint64)
print("torch", torch.__version__.partition("+")[0], "numpy", np.__version__)
print("equal dtypes:", listed.dtype == named.dtype, listed.dtype, named.dtype)
print("from a list:", taken(listed))
print("with dtype:", taken(named))
print("viewed as int64:", taken(listed.view(np.int64)))
PYTHON
"$place/venv/bin/python" -W ignore "$place/run.py" | tee "$place/seen"
diff "$place/seen" - <<'SEEN'
torch 2.13.0 numpy 2.4.6
equal dtypes: True uint64 uint64
from a list: TypeError: can't convert np.ndarray of type numpy.ulonglong
with dtype: torch.uint64
viewed as int64: torch.int64
SEEN
