#!/usr/bin/env bash
# Library:   PyTorch 2.13.0: sparse COO tensors.
# Expected:  only the entries take memory, so rows may be named by ids of 64 bits: any shape of int64 sizes is possible.
# Happens:   a shape whose product exceeds 2**63 - 1 is refused, although no dense tensor is wanted. With rows of 64
#            numbers, ids of 56 bits are possible and ids of 62 bits are not.
# Seen:      2026-11-30
# For users: gradients of embeddings with hashed ids need row numbers of fewer bits, or small numbers that stand for them.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0

cat > "$place/run.py" <<'PYTHON'
import torch


def made(rows, width):
    ids = torch.tensor([[5, rows - 1]])
    try:
        one = torch.sparse_coo_tensor(ids, torch.ones(2, width), (rows, width), check_invariants=False)
    except RuntimeError as error:
        return f"RuntimeError: {str(error).splitlines()[0]}"
    return f"{one._nnz()} entries"


print("torch", torch.__version__.partition("+")[0])
for bits, width in ((56, 64), (62, 64), (62, 1)):
    print(f"2**{bits} rows of {width}:", made(2**bits, width))
PYTHON
"$place/venv/bin/python" -W ignore "$place/run.py" | tee "$place/seen"
diff "$place/seen" - <<'SEEN'
torch 2.13.0
2**56 rows of 64: 2 entries
2**62 rows of 64: RuntimeError: numel: integer multiplication overflow
2**62 rows of 1: 2 entries
SEEN
