#!/usr/bin/env bash
# Phantom clipping stalls a run | trainer: FSDP2 in FP32 | rollout: vLLM in BF16 | a CPU | arXiv 2510.26788
# Writes the task of each seed, then runs the arms of phantom_clipping.yaml. After an interruption the same command continues.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

############################ user-adjustable ############################
PYTHON=${PYTHON:-python}
ARMS=${ARMS:-clipped shadow fp32} # names of phantom_clipping.yaml's arms, or all
SEEDS=${SEEDS:-0}
#########################################################################

export VERL_PLATFORM=cpu
# shellcheck disable=SC2046,SC2086 # names and seeds are separate words
{
    "$PYTHON" recipes/phantom_clipping/make_task.py outputs/phantom_clipping/task --seeds $SEEDS
    "$PYTHON" -m verl_precision.cli compare recipes/phantom_clipping/phantom_clipping.yaml --parallel 2 \
        $(printf -- '--arm %s ' $ARMS) $(printf -- '--seed %s ' $SEEDS) "$@"
}
