#!/usr/bin/env bash
# Library:   torch 2.13.0, on a CPU
# Expected:  torch.optim.SGD([p], lr=0.5, fused=True) moves all elements of p, in each dtype that it accepts.
# Happens:   weights in bfloat16 and float16 stay as they are, without a word, in all full vectors; only what is left
#            behind the last full vector moves. Of 100 weights 96 stay. float32 and float64 are right.
# Seen:      2026-11-28
# For users: do not use fused=True with half-precision weights on a CPU. fused=False and foreach=True are right, and so
#            is kvtrainer's "torch:SGD" with fused=True.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cat > "$folder/show.py" <<'PYTHON'
import sys

import torch

print("torch", torch.__version__)
seen = {}
for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
    for fused in (False, True):
        weight = torch.nn.Parameter(torch.ones(100, dtype=dtype))
        weight.grad = torch.ones_like(weight)
        torch.optim.SGD([weight], lr=0.5, fused=fused).step()
        seen[dtype, fused] = int((weight == 1).sum())
        print(f"{dtype}, fused={fused}: {seen[dtype, fused]} of 100 weights did not move")
halves = (torch.bfloat16, torch.float16)
as_described = all(
    (count > 0) == (fused and dtype in halves) for (dtype, fused), count in seen.items()
)
print("as described" if as_described else "this has changed")
sys.exit(not as_described)
PYTHON
"$folder/env/bin/python" "$folder/show.py"
