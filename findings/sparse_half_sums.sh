#!/usr/bin/env bash
# Library:   torch 2.13.0, on a CPU
# Expected:  two lookups of an nn.Embedding(sparse=True) in one loss have one gradient, in each dtype of the weights.
# Happens:   in float16 the backward pass raises NotImplementedError, and in bfloat16 it depends on where the gradient of
#            the results lies in memory: after .sum(), which expands one number, it raises, after a product it does not.
#            float32 is right.
# Seen:      2026-12-01
# For users: look all ids up in one call, or use float32. kvtrainer.Embedding adds bfloat16 whatever the loss is; two
#            lookups in float16 on a CPU are refused with a message that names the table, and passes before a step add up.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cat > "$folder/show.py" <<'PYTHON'
import sys

import torch

print("torch", torch.__version__)
raised = {}
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    factors = torch.ones(2, dtype=dtype)
    for loss in ("sum", "product"):
        table = torch.nn.Embedding(10, 2, sparse=True, dtype=dtype)
        found = [table(torch.tensor(ids)) for ids in ([1, 2], [2, 3])]
        total = sum((one if loss == "sum" else one * factors).sum() for one in found)
        try:
            total.backward()
            raised[dtype, loss] = ""
        except NotImplementedError as error:
            raised[dtype, loss] = str(error)
        print(f"{dtype}, {loss}: {raised[dtype, loss] or 'added'}")
seen = [bool(text) for text in raised.values()]
as_described = seen == [False, False, True, False, True, True]
print("as described" if as_described else "this has changed")
sys.exit(not as_described)
PYTHON
"$folder/env/bin/python" "$folder/show.py"
