#!/bin/sh
# Run examples/deploy/slurm.sbatch with a real Slurm on two hosts, which are network namespaces of this one:
#
#     slurm.sh BIN
#
# The job trains with four workers and two servers, `train.py` of docs/start.md, with the commands in the folder BIN. Needs
# root, and Debian's slurmctld, slurmd, slurm-client and munge; nothing of a Slurm that runs here already is touched.
set -eu

bin=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."
root=$PWD
place=$(mktemp -d)
chmod 755 "$place"
daemons=
finish() {
    for pid in $daemons; do kill "$pid" 2> /dev/null || true; done
    for pid in $daemons; do wait "$pid" 2> /dev/null || true; done
    for host in 1 2; do ip netns delete kvslurm$host 2> /dev/null || true; done
    rm -rf "$place"
}
trap finish EXIT
trap 'exit 1' INT TERM

# A command on a host: the network and the name are its own, files are this machine's.
on() { host=$1 && shift && exec nsenter --net=/run/netns/kvslurm"$host" unshare --uts sh -c "hostname kvslurm$host; exec $*"; }

for host in 1 2; do ip netns add kvslurm$host; done
ip link add kvs1 netns kvslurm1 type veth peer name kvs2 netns kvslurm2
for host in 1 2; do
    ip -n kvslurm$host address add 10.213.5.$host/24 dev kvs$host
    ip -n kvslurm$host link set kvs$host up
    ip -n kvslurm$host link set lo up
    mkdir "$place/kvslurm$host"
done
mkdir "$place/state" "$place/munge" "$place/job"
dd if=/dev/urandom of="$place/munge/key" bs=128 count=1 2> /dev/null
chmod 600 "$place/munge/key"
chown -R munge "$place/munge"
cat > "$place/cgroup.conf" <<END
CgroupAutomount=no
END
cat > "$place/slurm.conf" <<END
ClusterName=kvslurm
SlurmctldHost=kvslurm1(10.213.5.1)
SlurmUser=root
AuthInfo=socket=$place/munge/socket
StateSaveLocation=$place/state
SlurmdSpoolDir=$place/%n
SlurmctldPidFile=$place/slurmctld.pid
SlurmdPidFile=$place/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
NodeName=kvslurm1 NodeAddr=10.213.5.1 CPUs=4
NodeName=kvslurm2 NodeAddr=10.213.5.2 CPUs=4
PartitionName=all Nodes=ALL Default=YES
END
export SLURM_CONF="$place/slurm.conf"
setpriv --reuid=munge --regid=munge --clear-groups munged --foreground --socket="$place/munge/socket" --key-file="$place/munge/key" \
    --pid-file="$place/munge/pid" --log-file="$place/munge/log" --seed-file="$place/munge/seed" 2> "$place/log" &
daemons="$daemons $!"
until [ -S "$place/munge/socket" ]; do sleep 0.1; done
for start in "1 slurmctld -D" "1 slurmd -D -N kvslurm1" "2 slurmd -D -N kvslurm2"; do
    (on $start) >> "$place/log" 2>&1 &
    daemons="$daemons $!"
done

"$bin/python" - docs/start.md > "$place/job/train.py" <<'END'
import re, sys
print(re.search('```python title="train.py"\n(.*?)```', open(sys.argv[1]).read(), re.DOTALL)[1])
END
cd "$place/job"
export PATH="$bin:$PATH" SERVERS=2 OMP_NUM_THREADS=1
(on 1 sbatch --wait --nodes=2 --ntasks=4 --output=said --export=ALL "$root/examples/deploy/slurm.sbatch" python train.py)
cat said
[ "$(grep -c 'loss 0.072' said)" -eq 4 ]
[ "$(find . -name 'kvtrainer-*' | wc -l)" -eq 0 ]
