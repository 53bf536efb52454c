"""Workers under plain torchrun, with servers that were started separately."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.processes import Processes

SCRIPT = """
import sys, torch, kvtrainer
torch.set_num_threads(1)
kv = kvtrainer.kvstore.create("dist_sync")
kv.init("w", torch.zeros(3))
out = torch.empty(3)
kv.pushpull("w", torch.full((3,), 10.0 ** kv.rank), out=out)
sys.stdout.write(f"{kv.rank} {kv.num_workers} {out.tolist()}\\n")  # at once, or the lines of workers get mixed up
"""


def test_workers_of_torchrun_join_the_servers_of_a_list(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with Processes() as processes:
        listed = ",".join(server.address for server in processes.servers(2))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        job = processes.start([*torchrun, str(script)], env={"KVSTORE_SERVERS": listed})
        lines = sorted([job.line(), job.line()])
        assert lines == [f"{rank} 2 [11.0, 11.0, 11.0]" for rank in range(2)]
        code, err = job.end()
        assert code == 0, err
