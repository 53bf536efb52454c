"""The templates for clusters: a batch file that is run here, and manifests that Kubernetes would take."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvstore_server.cli import build_server_parser
from kvstore_server.descriptor_store import MAX_DESCRIPTORS
from kvstore_server.restarts import CRASH_LOOP, REPLACED, RESTARTS
from kvstore_server.supervisor import DURABILITY
from kvtrainer.common.env import Topology, read_topology_from_env
from kvtrainer.errors import ConfigurationError
from kvtrainer.jobs import kvlaunch
from tests.support.launch_jobs import resuming
from tests.support.limits import JOB_LIMIT, LIMIT
from tests.support.processes import Processes

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "examples" / "deploy"

# Slurm, as far as the batch file knows it: steps whose tasks find SLURM_PROCID and SLURM_NTASKS, and signals to a step.

SRUN = """#!/bin/bash
tasks=$SLURM_NTASKS pids=() code=0
while [[ $1 == --* ]]; do [[ $1 != --ntasks=* ]] || tasks=${1#*=}; shift; done
[ -e "$STEPS/0" ] || echo $$ > "$STEPS/0"
trap 'kill -TERM "${pids[@]}"' TERM
for ((rank = 0; rank < tasks; rank++)); do
    SLURM_PROCID=$rank SLURM_NTASKS=$tasks "$@" &
    pids+=($!)
done
for pid in "${pids[@]}"; do
    while kill -0 $pid 2> /dev/null; do wait $pid; code=$?; done
    wait $pid || code=$?
done
exit $code
"""
SCANCEL = """#!/bin/bash
[ "$*" = "--signal=TERM 77.0" ] && kill -TERM "$(cat "$STEPS/0")"
"""
SERVER = """#!/bin/bash
[ "$1" != keygen ] || { mkdir -m 700 "$2"; exit; }
echo "$@" >> "$STEPS/servers"
trap 'echo drained; exit 0' TERM
[ -z "$SILENT" ] || exit 3
echo "tcp://127.0.0.1:$((5000 + SLURM_PROCID))" >&3
exec 3>&-
while :; do sleep 0.05; done
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a job of two tasks on one host; its steps are noted in `STEPS`."""
    programs, steps = tmp_path / "bin", tmp_path / "steps"
    programs.mkdir()
    steps.mkdir()
    for name, text in (("srun", SRUN), ("scancel", SCANCEL), ("kvstore-server", SERVER)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "2", "SILENT": ""}
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("KVSTORE_", "SLURM_"))}
    return {**inherited, **job, "PATH": f"{programs}:{os.environ['PATH']}", "STEPS": str(steps)}


def submit(environ: Mapping[str, str], folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run the batch file as Slurm does on the first host of a job, in a directory of its own."""
    work = folder / "work"
    work.mkdir()
    script = ["bash", str(DEPLOY / "slurm.sbatch"), *command]
    done = subprocess.run(
        script, cwd=work, env=environ, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert list(work.iterdir()) == []
    return done


def test_the_batch_file_runs_servers_as_one_step_and_then_a_worker_in_each_task_of_another(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    show = 'echo "worker $SLURM_PROCID of $SLURM_NTASKS: $KVSTORE_SERVERS"'
    done = submit({**slurm, "SERVERS": "3"}, tmp_path, "sh", "-c", show)
    servers = ",".join(f"tcp://127.0.0.1:{5000 + index}" for index in range(3))
    assert done.returncode == 0, done.stderr
    said = sorted(done.stdout.splitlines())
    assert said == ["drained"] * 3 + [f"worker {rank} of 2: {servers}" for rank in range(2)]
    place = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "KVSTORE_SERVERS": servers}
    assert read_topology_from_env(place) == Topology(1, 2, tuple(servers.split(",")))


def test_servers_of_the_batch_file_get_flags_that_they_know_and_listen_publicly_only_on_several_hosts(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    assert submit({**slurm, "SERVERS": "2"}, tmp_path, "true").returncode == 0
    lines = (Path(slurm["STEPS"]) / "servers").read_text().splitlines()
    flags = sorted(
        [build_server_parser({}).parse_args(line.split()) for line in lines], key=lambda one: one.index
    )
    assert [(one.index, one.num_servers, one.ready_fd) for one in flags] == [(0, 2, 3), (1, 2, 3)]
    assert {one.bind for one in flags} == {"tcp://127.0.0.1:0"}


def test_a_worker_that_fails_gives_the_batch_job_its_code_and_servers_are_drained(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    done = submit(slurm, tmp_path, "sh", "-c", "exit $((7 * SLURM_PROCID))")
    assert (done.returncode, done.stdout) == (7, "drained\n")


def test_with_restarts_servers_of_the_batch_file_are_supervised(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    assert submit({**slurm, "RESTARTS": "3"}, tmp_path, "true").returncode == 0
    [line] = (Path(slurm["STEPS"]) / "servers").read_text().splitlines()
    flags = build_server_parser({}).parse_args(line.split())
    assert (flags.supervise, flags.restarts, flags.ready_fd) == (True, 3, 3)


def test_with_restarts_a_worker_of_the_batch_file_is_started_again_where_it_was(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    work = 'echo "$SLURM_PROCID $KVSTORE_RESTARTS"; [ $SLURM_PROCID = 0 ] || exit $((2 - KVSTORE_RESTARTS))'
    done = submit({**slurm, "RESTARTS": "2"}, tmp_path, "sh", "-c", work)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 0", "1 0", "1 1", "1 2", "drained"]
    assert done.stderr.splitlines() == [
        "worker 1 exited with code 2; restart 1 of 2",
        "worker 1 exited with code 1; restart 2 of 2",
    ]


@pytest.mark.parametrize(("code", "starts"), [(7, 3), (75, 1)])
def test_a_worker_of_the_batch_file_that_fails_for_good_or_was_replaced_gives_its_code(
    slurm: dict[str, str], tmp_path: Path, code: int, starts: int
) -> None:
    environ = {**slurm, "RESTARTS": "2", "SLURM_NTASKS": "1"}
    done = submit(environ, tmp_path, "sh", "-c", f"echo begins; exit {code}")
    assert (done.returncode, done.stdout) == (code, "begins\n" * starts + "drained\n")


@pytest.mark.parametrize(
    ("changes", "command", "told"),
    [
        ({"SERVERS": "0"}, ["true"], "SERVERS of at least 1 (it is 0)"),
        ({}, [], "give a command for the workers"),
        ({"SILENT": "1"}, ["true"], "not all of 1 servers listened within a minute"),
    ],
)
def test_a_batch_job_that_cannot_start_says_why_in_one_line(
    slurm: dict[str, str], tmp_path: Path, changes: dict[str, str], command: list[str], told: str
) -> None:
    done = submit({**slurm, **changes}, tmp_path, *command)
    assert (done.returncode, done.stdout) == (1 if "SILENT" in changes else 2, "")
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


# Kubernetes.


@pytest.fixture
def manifests() -> dict[str, Any]:
    """The manifests by kind."""
    yaml = pytest.importorskip("yaml", reason="make test-deploy installs what this needs")
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    return {one["kind"]: one for one in documents}


def env_of(container: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}


def container_of(manifest: dict[str, Any]) -> dict[str, Any]:
    [container] = manifest["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = container
    return found


@pytest.mark.parametrize("version", ["1.29", "1.32"])
def test_kubernetes_takes_the_manifests(manifests: dict[str, Any], version: str) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="make test-deploy installs what this needs")
    assert sorted(manifests) == ["Job", "NetworkPolicy", "Service", "StatefulSet"]
    for manifest in manifests.values():
        validator.validate(manifest, version, strict=True)


def test_a_wrong_manifest_would_have_been_noticed(manifests: dict[str, Any]) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="make test-deploy installs what this needs")
    manifests["StatefulSet"]["spec"]["replica"] = 2
    with pytest.raises(validator.ValidationError):
        validator.validate(manifests["StatefulSet"], "1.32", strict=True)


def test_the_numbers_of_the_manifests_are_of_one_job(manifests: dict[str, Any]) -> None:
    service, servers, job = manifests["Service"], manifests["StatefulSet"], manifests["Job"]
    worker, server = container_of(job), container_of(servers)
    name, count = servers["metadata"]["name"], servers["spec"]["replicas"]
    assert (job["spec"]["completions"], job["spec"]["completionMode"]) == (
        job["spec"]["parallelism"],
        "Indexed",
    )
    assert servers["spec"]["serviceName"] == service["metadata"]["name"]
    pods = servers["spec"]["template"]["metadata"]["labels"]
    assert pods == service["spec"]["selector"] == servers["spec"]["selector"]["matchLabels"]
    [port] = [one["containerPort"] for one in server["ports"]]
    place = read_topology_from_env({**env_of(worker), "KVSTORE_RANK": "0"})
    hosts = [f"tcp://{name}-{index}.{service['metadata']['name']}:{port}" for index in range(count)]
    assert place == Topology(0, job["spec"]["completions"], tuple(hosts))
    flags = build_server_parser(env_of(server)).parse_args(["--index", str(count - 1)])
    assert (flags.num_servers, flags.bind) == (count, f"tcp://0.0.0.0:{port}")
    # Both have keys, from one secret, of which workers get their own alone.
    assert flags.keys == env_of(worker)["KVSTORE_KEYS"] == "/keys"
    [of_servers, of_workers] = [
        [one["secret"] for one in pod["spec"]["template"]["spec"]["volumes"] if one["name"] == "keys"]
        for pod in (servers, manifests["Job"])
    ]
    assert of_servers[0]["secretName"] == of_workers[0]["secretName"]
    assert {item["key"] for item in of_workers[0]["items"]} == {"server.public", "worker.secret"}
    assert flags.drain_timeout < servers["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]


def test_a_worker_of_a_manifest_with_zero_workers_says_so_in_one_line(manifests: dict[str, Any]) -> None:
    """With zero completions Kubernetes starts none, and calls the Job complete."""
    environ = {**env_of(container_of(manifests["Job"])), "KVSTORE_NUM_WORKERS": "0", "KVSTORE_RANK": "0"}
    with pytest.raises(ConfigurationError) as caught:
        read_topology_from_env(environ)
    [line] = str(caught.value).splitlines()
    assert "KVSTORE_NUM_WORKERS) is 0" in line


def test_a_worker_of_the_manifests_comes_back_with_its_rank_and_servers_have_a_supervisor(
    manifests: dict[str, Any],
) -> None:
    job, [_, _, command] = manifests["Job"]["spec"], container_of(manifests["StatefulSet"])["command"]
    assert (job["backoffLimitPerIndex"], job["maxFailedIndexes"]) == (3, 0)
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    [rule] = job["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [REPLACED])
    [counter] = [one for one in container_of(manifests["Job"])["env"] if one["name"] == RESTARTS]
    assert "job-index-failure-count" in counter["valueFrom"]["fieldRef"]["fieldPath"]
    flags = build_server_parser({}).parse_args(
        command.partition("kvstore-server ")[2].replace("${HOSTNAME##*-}", "1").split()
    )
    assert flags.supervise


def test_servers_of_the_manifests_write_snapshots_to_a_volume_that_outlives_a_pod(
    manifests: dict[str, Any],
) -> None:
    servers = manifests["StatefulSet"]
    flags = build_server_parser(env_of(container_of(servers))).parse_args([])
    mounts = {one["mountPath"]: one["name"] for one in container_of(servers)["volumeMounts"]}
    claims = [claim["metadata"]["name"] for claim in servers["spec"]["volumeClaimTemplates"]]
    assert mounts[flags.state_dir] in claims
    assert flags.snapshot_every.rounds == 50


def test_only_workers_reach_the_servers_and_no_pod_has_privileges(manifests: dict[str, Any]) -> None:
    policy = manifests["NetworkPolicy"]["spec"]
    [rule] = policy["ingress"]
    allowed = [peer["podSelector"]["matchLabels"] for peer in rule["from"]]
    assert allowed == [manifests["Job"]["spec"]["template"]["metadata"]["labels"]]
    assert policy["podSelector"]["matchLabels"] == manifests["Service"]["spec"]["selector"]
    for kind in ("Job", "StatefulSet"):
        container = container_of(manifests[kind])
        assert manifests[kind]["spec"]["template"]["spec"]["securityContext"]["runAsNonRoot"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]


# systemd.

UNIT = DEPLOY / "kvstore-server@.service"


def settings(section: str) -> list[tuple[str, str]]:
    """The settings in a section of the unit, which may occur several times."""
    text = UNIT.read_text().partition(f"[{section}]\n")[2].partition("\n[")[0]
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, value) for name, _, value in (line.partition("=") for line in lines)]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("mistake", [False, True])
def test_systemd_takes_the_unit_and_a_mistake_would_have_been_noticed(tmp_path: Path, mistake: bool) -> None:
    text = UNIT.read_text().replace("/opt/kvtrainer/bin/kvstore-server", shutil.which("true") or "")
    (tmp_path / UNIT.name).write_text(
        text.replace("FileDescriptorStoreMax", "FileDescriptors") if mistake else text
    )
    verify = ["systemd-analyze", "verify", str(tmp_path / UNIT.name.replace("@", "@0"))]
    done = subprocess.run(verify, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert ("FileDescriptors" in done.stderr) == mistake, done.stderr
    assert bool(done.stderr) == mistake


def test_the_unit_keeps_the_memory_of_a_server_and_starts_it_again_unless_that_is_in_vain() -> None:
    unit, service = dict(settings("Unit")), dict(settings("Service"))
    assert (service["Restart"], int(service["FileDescriptorStoreMax"])) == ("on-failure", MAX_DESCRIPTORS)
    assert service["RestartPreventExitStatus"].split() == ["2", str(REPLACED)]
    assert service["Type"] == "notify"
    assert int(unit["StartLimitBurst"]) == CRASH_LOOP
    environ = dict(value.split("=") for name, value in settings("Service") if name == "Environment")
    assert environ.pop(DURABILITY) == "process"
    flags = build_server_parser(environ).parse_args(service["ExecStart"].replace("%i", "1").split()[1:])
    assert (flags.index, flags.num_servers, flags.bind) == (1, 2, "tcp://127.0.0.1:5551")
    assert flags.drain_timeout < int(service["TimeoutStopSec"])


# torchrun.


def test_workers_that_torchrun_starts_again_resume_with_the_bits_of_a_job_without_a_death(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(
        resuming('os.environ["TORCHELASTIC_RESTART_COUNT"] == os.environ["DIES"]')
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    said: list[str] = []
    for dies, told in (("never", 0), ("0", 1)):
        with Processes() as processes:
            [server] = processes.servers(1)
            environ = {
                "KVSTORE_SERVERS": server.address,
                "KVSTORE_ATTEMPT": "0",
                "DIES": dies,
                "OMP_NUM_THREADS": "1",
            }
            done = subprocess.run(
                [*torchrun, "--max-restarts", "1", "train.py"], cwd=tmp_path, capture_output=True, text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT), **environ}, timeout=JOB_LIMIT, check=False,
            )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("exitcode: -9") == told
        said += done.stdout.splitlines()
    assert len(said) == 4
    assert len(set(said)) == 1


# Containers.


def test_the_image_runs_a_job_as_an_ordinary_user_with_what_make_wheel_builds() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    assert steps[:2] == [["ARG", "BASE=python:3.12-slim"], ["FROM", "$BASE"]]
    assert ["USER", "1000"] in steps
    assert ["COPY", "kvtrainer-*.whl /tmp/"] in steps
    [command] = [eval(rest, {}) for step, rest in steps if step == "CMD"]
    program, *arguments = command
    options, worker = kvlaunch._parse_arguments(arguments)
    assert (program, options.workers, options.servers, worker) == ("kvlaunch", 2, 2, ["python", "train.py"])
