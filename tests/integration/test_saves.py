"""`kv.save` and `kv.load` of a store on real servers: what they refuse, and that nothing has changed then."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kvtrainer
from kvtrainer.errors import ConfigurationError, UnknownNameError


def step(trainer: kvtrainer.Trainer, net: torch.nn.Module) -> None:
    net(torch.ones(2)).sum().backward()
    trainer.step(1)


@pytest.mark.usefixtures("forked_cluster")
def test_what_cannot_be_saved_or_loaded_is_refused_and_training_goes_on(tmp_path: Path) -> None:
    flags = ["--state-dir", str(tmp_path), "--snapshot-every", "0"]
    with kvtrainer.local_cluster(workers=1, servers=2, server_args=flags) as cluster:
        where = {"rank": 0, "num_workers": 1, "servers": cluster.servers, "keys": cluster.keys}
        kv = kvtrainer.kvstore.DistKVStore("dist_sync", namespace="job", **where)
        net = torch.nn.Linear(2, 600)
        trainer = kvtrainer.Trainer(net, "adam", kvstore=kv)
        # 1. Before there is anything.
        with pytest.raises(ConfigurationError, match="after the first step"):
            kv.save("a")
        with pytest.raises(UnknownNameError):
            kv.load("a")
        # 2. While it trains.
        trainer.resume()
        step(trainer, net)
        for tag in ("../a", "", None):
            with pytest.raises(ConfigurationError, match="a tag has"):
                kv.save(tag)  # type: ignore[arg-type]
        kv.save("a")
        with pytest.raises(ConfigurationError, match="too late"):
            kv.load("a")
        step(trainer, net)
        # 3. Another Trainer of the same store that has made fewer steps.
        other = kvtrainer.Trainer(torch.nn.Linear(2, 1), "sgd", kvstore=kv)
        other.resume()
        with pytest.raises(ConfigurationError, match="1 and 3 rounds"):
            kv.save("b")
        assert [len(list(tmp_path.glob(f"server-*/save-{tag}.*"))) for tag in "ab"] == [
            1,
            0,
        ]  # a small table is on one server
        other.close()
        trainer.close()
        kv.close()
        # 4. Stores whose rounds are no state of all workers.
        for kind in ("dist_async", "dist_ssp"):
            with kvtrainer.kvstore.DistKVStore(kind, namespace=kind, **where) as store:
                for call in (store.save, store.load):
                    with pytest.raises(ConfigurationError, match="asynchronous"):
                        call("a")


@pytest.mark.usefixtures("forked_cluster")
def test_servers_without_a_directory_refuse(tmp_path: Path) -> None:
    with kvtrainer.local_cluster(workers=1) as cluster:
        where = {"servers": cluster.servers, "keys": cluster.keys}
        kv = kvtrainer.kvstore.DistKVStore(rank=0, num_workers=1, namespace="job", **where)
        with pytest.raises(ConfigurationError, match="no --state-dir"):
            kv.load("a")
        net = torch.nn.Linear(2, 1)
        trainer = kvtrainer.Trainer(net, "sgd", kvstore=kv)
        trainer.resume()
        step(trainer, net)
        with pytest.raises(ConfigurationError, match="no --state-dir"):
            kv.save("a")
        trainer.close()
        kv.close()
