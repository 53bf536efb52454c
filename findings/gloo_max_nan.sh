#!/usr/bin/env bash
# Library:   torch 2.13.0, torch.distributed over gloo, three ranks
# Expected:  all_reduce with ReduceOp.MAX or MIN gives NaN where one rank has NaN, as torch.maximum does, so that a loss
#            or a norm that is NaN on one rank is seen by all.
# Happens:   of a tensor of one element only the NaN of rank 0 is seen; those of the others are lost, and the result is
#            the greatest of the other numbers on every rank. In longer tensors it depends on the element's position
#            which ranks' NaN survives. ReduceOp.SUM keeps every NaN.
# Seen:      2026-11-28
# For users: do not look for a NaN by MAX or MIN over gloo. Add up the values, or the flags isnan().float().
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cat > "$folder/show.py" <<'PYTHON'
import datetime
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 3


def work(rank, meeting):
    limit = datetime.timedelta(seconds=120)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS, timeout=limit
    )
    seen = {}
    for name in ("MAX", "MIN", "SUM"):
        for owner in range(RANKS):
            value = torch.tensor([float("nan") if rank == owner else 1.0])
            dist.all_reduce(value, getattr(dist.ReduceOp, name))
            seen[name, owner] = value.isnan().item()
            if rank == 0:
                print(f"{name} of one NaN, on rank {owner}, and of ones: {value.item()}")
    expected = {(n, o): n == "SUM" or o == 0 for n in ("MAX", "MIN", "SUM") for o in range(RANKS)}
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(seen != expected)


if __name__ == "__main__":
    print("torch", torch.__version__)
    context = mp.get_context("spawn")
    ranks = [context.Process(target=work, args=(rank, sys.argv[1])) for rank in range(RANKS)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    as_described = not any(one.exitcode for one in ranks)
    print("as described" if as_described else "this has changed")
    sys.exit(not as_described)
PYTHON
"$folder/env/bin/python" "$folder/show.py" "$folder/meeting"
