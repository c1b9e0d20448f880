#!/usr/bin/env bash
# Trains on two "hosts": network namespaces with an address each and a cable between them. It needs no rights.
#   tests/two_hosts.sh PROCESSES train.py key=value ...      so many processes on each
set -eu
if [ -z "${INSIDE:-}" ]; then INSIDE=1 exec unshare -rn bash "$0" "$@"; fi
processes=$1
shift

unshare -n sleep 600 &
other=$!
trap 'kill $other' EXIT
until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do sleep 0.05; done
ip link add cable type veth peer name cable netns $other
bring_up="ip link set lo up; ip link set cable up; ip addr add dev cable"
bash -c "$bring_up 10.0.0.1/24"
nsenter -t $other -n bash -c "$bring_up 10.0.0.2/24"

# Static rendezvous: each host is told who it is. GLOO_SOCKET_IFNAME: by which of its addresses the other one finds it.
export GLOO_SOCKET_IFNAME=cable
torchrun="python -m torch.distributed.run --nnodes 2 --nproc-per-node $processes --master-addr 10.0.0.1"
nsenter -t $other -n $torchrun --node-rank 1 "$@" &
second=$!
code=0
$torchrun --node-rank 0 "$@" || code=$?
wait $second || code=$?
exit $code
