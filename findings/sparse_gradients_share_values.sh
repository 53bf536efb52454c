#!/usr/bin/env bash
# Library:   torch 2.13.0, on a CPU
# Expected:  the gradients of two parameters are two tensors: what is done to one in place leaves the other as it is.
# Happens:   two nn.Embedding(sparse=True) whose results are added get sparse gradients with the same values in memory.
#            GradScaler.unscale_ divides each, so both are divided twice by the scale: without a word a step is as many
#            times too small. Dense embeddings are right: their gradients have memory of their own.
# Seen:      2026-12-01
# For users: with such a model use kvtrainer's GradScaler or amp="dynamic", or kvtrainer.Embedding, whose gradients own
#            their memory; with torch alone, multiply one of the results by 1.0 before they are added.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cat > "$folder/show.py" <<'PYTHON'
import sys

import torch

print("torch", torch.__version__)
ids, moved = torch.tensor([5, 6]), {}
for sparse in (False, True):
    users, items = (torch.nn.Embedding(10, 2, sparse=sparse) for _ in range(2))
    before = users.weight.detach().clone()
    optimizer = torch.optim.SGD([users.weight, items.weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(((users(ids) + items(ids)) * torch.full((2,), 3.0)).sum()).backward()
    if sparse:
        values = [one.weight.grad._values().data_ptr() for one in (users, items)]
        print("the values of both gradients are in the same memory:", values[0] == values[1])
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    moved[sparse] = round(float((before - users.weight)[5, 0].detach()), 4)
    print(f"sparse={sparse}: a weight with gradient 3 and rate 1 has moved by {moved[sparse]}")
as_described = moved[False] == 3.0 and abs(moved[True] - 3.0 / 1024) < 1e-3
print("as described" if as_described else "this has changed")
sys.exit(not as_described)
PYTHON
"$folder/env/bin/python" "$folder/show.py"
