#!/usr/bin/env bash
# Two Ray nodes on this machine, a recipe on both, on CPUs: recipes/launch/cpu_2nodes.sh RECIPE.yaml [OVERRIDE ...]
# FSDP2 over gloo across the nodes, a vLLM replica on each. It stops only the processes that it started. It needs 12 GiB of memory.
# If a node is lost, the run ends with code 75, and the same command resumes from the last checkpoint.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." # Ray's workers inherit this folder from their node

############################ user-adjustable ############################
RAY=${RAY:-ray}
PORT=${PORT:-26379}  # of the head's GCS; not Ray's default 6379, which another Ray may use
CPUS=${CPUS:-16}     # logical CPUs of each node: verl's actors reserve more than a laptop has
export VERL_FILE_LOGGER_ROOT=${VERL_FILE_LOGGER_ROOT:-checkpoints} # as in run.sh, for the workers of both nodes
#########################################################################

RECIPE=${1:?give a recipe, e.g. recipes/moe/moe.yaml}
shift
# Short, because Ray puts UNIX sockets into it and their paths are limited to 107 bytes.
FOLDER=$(mktemp -d /tmp/vp2-XXXXXX)
NODES=()

stop() {
    for ((i = ${#NODES[@]} - 1; i >= 0; i--)); do # the head last
        kill -TERM "${NODES[i]}" 2>/dev/null || true
    done
    for ((i = 0; i < 20; i++)); do
        kill -0 "${NODES[@]}" 2>/dev/null || break
        sleep 1
    done
    kill -KILL "${NODES[@]}" 2>/dev/null || true # for a process that ignores SIGTERM
    rm -rf "$FOLDER"
}
trap stop EXIT

start() {
    "$RAY" start --node-ip-address=127.0.0.1 --num-cpus="$CPUS" --num-gpus=1 --disable-usage-stats --block "$@" \
        >>"$FOLDER/nodes.log" 2>&1 &
    NODES+=($!)
}

await() { # until COUNT nodes are in the cluster
    for ((i = 0; i < 90; i++)); do
        for node in "${NODES[@]}"; do
            if ! kill -0 "$node" 2>/dev/null; then
                echo "a Ray node ended at once; its log:" >&2
                cat "$FOLDER/nodes.log" >&2
                exit 1
            fi
        done
        if [[ $("$RAY" status --address="127.0.0.1:$PORT" 2>/dev/null | grep -c ' node_') == "$1" ]]; then
            return
        fi
        sleep 1
    done
    echo "no Ray cluster of $1 nodes after 90 seconds; its log:" >&2
    cat "$FOLDER/nodes.log" >&2
    exit 1
}

export VERL_PLATFORM=cpu VLLM_CPU_KVCACHE_SPACE=1 # of every process on the nodes
# Anyone who reaches Ray's ports could run code; with a token, only a client of this cluster can.
RAY_AUTH_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
start --head --port="$PORT" --temp-dir="$FOLDER/ray" --include-dashboard=false
await 1
start --address="127.0.0.1:$PORT"
await 2
RAY_ADDRESS=127.0.0.1:$PORT CLUSTER=127.0.0.1:$PORT bash recipes/launch/run.sh "$RECIPE" scale=cpu_2nodes "$@"
