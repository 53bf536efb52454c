#!/usr/bin/env bash
# Library:   torch 2.13.0, torch.optim.Optimizer.load_state_dict
# Expected:  an entry of a parameter's state comes back as it was given: text as text, and tensors with their dtype.
#            Optimizers may keep what they like there, and state_dict() hands it out unchanged.
# Happens:   text becomes "<generator object ...>", because everything iterable is made again from its items; and a
#            tensor, of int8 codes too, gets the dtype of the parameter if that is a floating-point one. Nothing is said.
# Seen:      2026-11-28
# For users: an optimizer that keeps text or quantised codes in its state has to restore them itself after loading.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cat > "$folder/show.py" <<'PYTHON'
import sys

import torch


class Modes(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"mode": "fast", "codes": torch.ones(2, dtype=torch.int8)}


print("torch", torch.__version__)
first, second = (Modes([torch.nn.Parameter(torch.zeros(2))]) for _ in range(2))
first.step()
given = first.state_dict()["state"][0]
second.load_state_dict(first.state_dict())
loaded = second.state_dict()["state"][0]
print("given: ", repr(given["mode"]), given["codes"].dtype)
print("loaded:", type(loaded["mode"]).__name__, str(loaded["mode"]).partition(" at ")[0], loaded["codes"].dtype)
as_described = str(loaded["mode"]).startswith("<generator object") and loaded["codes"].dtype == torch.float32
print("as described" if as_described else "this has changed")
sys.exit(not as_described)
PYTHON
"$folder/env/bin/python" "$folder/show.py"
