#!/usr/bin/env bash
# Library:   torch 2.13.0, torch.distributed.checkpoint.save and load, of an optimizer's state_dict()
# Expected:  load() puts each saved value where the one of the same path is, also where a path has a whole number, as the
#            state of a torch optimizer has: {"state": {0: {"product": 0.5}}}.
# Happens:   tensors come back there. A Python number, a text or a list comes back under the number's text, "0", beside
#            the number, where the former value stays. Optimizer.load_state_dict ignores "0". Nothing is said.
# Seen:      2026-11-28
# For users: an optimizer with plain numbers in its state goes on with those that it had before loading. Save the state by
#            names (torch.distributed.checkpoint.state_dict.get_optimizer_state_dict), or keep numbers as tensors.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cat > "$folder/show.py" <<'PYTHON'
import sys

import torch
from torch.distributed.checkpoint import load, save


class Product(torch.optim.Optimizer):
    """Keeps a tensor and a Python number for each parameter."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["product"] = state.get("product", 1.0) * 0.5
            state["sum"] = state.get("sum", torch.zeros(())) + 1.0


print("torch", torch.__version__)
first, second = (Product([torch.nn.Parameter(torch.zeros(2))]) for _ in range(2))
for _ in range(3):
    first.step()
second.step()
save({"optimizer": first.state_dict()}, checkpoint_id=sys.argv[1])
content = {"optimizer": second.state_dict()}
load(content, checkpoint_id=sys.argv[1])
loaded = content["optimizer"]["state"]
print("saved: ", first.state_dict()["state"])
print("loaded:", loaded)
second.load_state_dict(content["optimizer"])
state = second.state[second.param_groups[0]["params"][0]]
print("used:  ", state)
as_described = loaded.get("0") == {"product": 0.125} and state["product"] == 0.5 and state["sum"] == 3.0
print("as described" if as_described else "this has changed")
sys.exit(not as_described)
PYTHON
"$folder/env/bin/python" -W ignore "$folder/show.py" "$folder/checkpoint"
