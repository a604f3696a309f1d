#!/usr/bin/env bash
# Make this host the head of a Ray cluster, or join one:
#   recipes/launch/ray_start.sh                 on the first host; prints the address
#   recipes/launch/ray_start.sh HEAD[:PORT]     on every other host
# To leave: `ray stop` on each host; it ends every Ray process of yours on that host.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." # Ray's workers inherit this folder: the same on every host

############################ user-adjustable ############################
RAY=${RAY:-ray}
PORT=${PORT:-6379}
DASHBOARD_PORT=${DASHBOARD_PORT:-8265}  # of the head; ray job submit uses it
IP=${IP:-}                              # this host's address in the cluster; empty: Ray finds it
GPUS=${GPUS:-}                          # empty: Ray counts them
export VERL_FILE_LOGGER_ROOT=${VERL_FILE_LOGGER_ROOT:-checkpoints} # as in run.sh; workers have the variables of their node
#########################################################################

ARGUMENTS=(--disable-usage-stats)
if [[ -n $IP ]]; then
    ARGUMENTS+=(--node-ip-address="$IP")
fi
if [[ -n $GPUS ]]; then
    ARGUMENTS+=(--num-gpus="$GPUS")
fi
if [[ $# == 0 ]]; then
    ARGUMENTS+=(--head --port="$PORT" --dashboard-host=0.0.0.0 --dashboard-port="$DASHBOARD_PORT")
else
    HEAD=$1
    if [[ $HEAD != *:* ]]; then
        HEAD=$HEAD:$PORT
    fi
    ARGUMENTS+=(--address="$HEAD")
fi
set -x
exec "$RAY" start "${ARGUMENTS[@]}"
