#!/usr/bin/env bash
# Library:   torch 2.13.0, torch.distributed.checkpoint.state_dict
# Expected:  get_optimizer_state_dict(model, optimizer) reads the state and changes nothing.
# Happens:   where the optimizer has no state yet it lets the optimizer make a step with gradients of zero and a learning
#            rate of 0, so that there is a state to read. That step counts: the first real one is number 2, and Adam's
#            corrections are those of the second. One AdamW step from 1 by a gradient of 1 (lr 0.1, weight decay 0.5)
#            ends at 0.8756 instead of 0.85.
# Seen:      2026-11-28
# For users: a script that saves before its first step trains another run than one that does not. Save after the first
#            step, or give the checkpoint only what is there. With a kvtrainer.Trainer reading changes nothing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cat > "$folder/show.py" <<'PYTHON'
import sys

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

print("torch", torch.__version__)
ends = []
for reads in (False, True):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    if reads:
        get_optimizer_state_dict(model, optimizer)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    ends.append(round(model.weight.item(), 4))
    count = int(optimizer.state[model.weight]["step"])
    print(f"read before the first step: {reads}; weight {ends[-1]}, step count {count}")
as_described = ends == [0.85, 0.8756]
print("as described" if as_described else "this has changed")
sys.exit(not as_described)
PYTHON
"$folder/env/bin/python" "$folder/show.py"
