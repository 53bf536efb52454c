"""The image of the Dockerfile, run as docs/deployment.md says; and the pods of the manifests, each a container of it.

`make test-image` builds the image, and says which one it is. There is no cluster here: what Kubernetes would do to pods
is done with podman, as the manifests say: commands, environment, user, privileges, file systems, names and probes.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.limits import LIMIT
from tests.support.processes import eventually

IMAGE = os.environ.get("KVTRAINER_IMAGE", "")
MANIFESTS = Path(__file__).parent.parent / "examples" / "deploy" / "kubernetes.yaml"
SUBNET = "10.212.77"
pytestmark = pytest.mark.skipif(not IMAGE, reason="make test-image builds the image that this needs")


def podman(*arguments: str, seconds: float = LIMIT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["podman", *arguments], capture_output=True, text=True, timeout=seconds, check=False
    )


def test_the_image_trains_with_two_workers_and_two_servers() -> None:
    done = podman("run", "--rm", IMAGE)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[w0] loss 0.072", "[w1] loss 0.072"]


class Pods:
    """Containers that are what the manifests' pods would be, each with an address and a name of its own."""

    def __init__(self, manifests: Mapping[str, Any]) -> None:
        self.manifests = manifests
        servers, self.job = manifests["StatefulSet"]["spec"], manifests["Job"]["spec"]
        name, service = manifests["StatefulSet"]["metadata"]["name"], manifests["Service"]["metadata"]["name"]
        self.servers = [f"{name}-{index}" for index in range(servers["replicas"])]
        self.hosts = {f"{one}.{service}": f"{SUBNET}.{10 + at}" for at, one in enumerate(self.servers)}
        self.workers = [f"train-worker-{rank}" for rank in range(self.job["completions"])]
        self._spec = servers["template"]["spec"]

    def start(self) -> None:
        """Start all servers, then all workers; they wait for each other."""
        for name, address in zip(self.servers, self.hosts.values(), strict=True):
            self._run(name, self._spec, {}, "--ip", address)
        for rank, name in enumerate(self.workers):
            self._run(name, self.job["template"]["spec"], {"JOB_COMPLETION_INDEX": str(rank)})

    def _run(self, name: str, spec: Mapping[str, Any], environ: Mapping[str, str], *flags: str) -> None:
        [container] = spec["containers"]
        rights, all_rights = container["securityContext"], spec["securityContext"]
        assert rights["readOnlyRootFilesystem"]
        assert not rights["allowPrivilegeEscalation"]
        mounts = [one["mountPath"] for one in container["volumeMounts"]]
        assert mounts == (["/tmp", "/state"] if spec is self._spec else ["/tmp"])
        given = {one["name"]: one["value"] for one in container["env"] if "value" in one}
        environ = {**given, **environ}
        done = podman(
            "run", "--detach", "--name", name, "--hostname", name, "--network", "kvtrainer-pods", *flags,
            "--read-only", "--read-only-tmpfs=false", "--security-opt=no-new-privileges",
            *[f"--tmpfs={one}" for one in mounts],
            *[f"--cap-drop={one}" for one in rights["capabilities"]["drop"]],
            f"--user={all_rights['runAsUser']}:{all_rights['fsGroup']}",
            *[f"--env={one}={value}" for one, value in environ.items()],
            *[f"--add-host={one}:{address}" for one, address in self.hosts.items()],
            IMAGE, *container["command"],
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    def probe(self, name: str, kind: str) -> int:
        """The exit code of a probe of a server's container."""
        [container] = self._spec["containers"]
        return podman("exec", name, *container[kind]["exec"]["command"]).returncode

    def end(self) -> None:
        podman("rm", "--force", "--time=0", "--ignore", *self.servers, *self.workers)


@pytest.fixture
def pods() -> Iterator[Pods]:
    yaml = pytest.importorskip("yaml", reason="make test-image installs what this needs")
    started = Pods({one["kind"]: one for one in yaml.safe_load_all(MANIFESTS.read_text())})
    started.end()
    podman("network", "rm", "--force", "kvtrainer-pods")
    made = podman("network", "create", "--internal", f"--subnet={SUBNET}.0/24", "kvtrainer-pods")
    assert made.returncode == 0, made.stderr
    yield started
    started.end()
    podman("network", "rm", "--force", "kvtrainer-pods")


def test_the_pods_of_the_manifests_train_without_privileges_on_hosts_of_their_own(pods: Pods) -> None:
    pods.start()
    for name in pods.servers:
        assert eventually(lambda name=name: pods.probe(name, "startupProbe") == 0)
        assert pods.probe(name, "readinessProbe") == pods.probe(name, "livenessProbe") == 0
    codes = [podman("wait", name).stdout.strip() for name in pods.workers]
    said = [podman("logs", name) for name in pods.workers]
    assert codes == ["0"] * 4, [one.stderr for one in said]
    assert {one.stdout for one in said} == {"loss 0.072\n"}
    for name in pods.servers:
        assert podman("stop", "--time=30", name).returncode == 0
    assert [podman("wait", name).stdout.strip() for name in pods.servers] == ["0"] * 2
