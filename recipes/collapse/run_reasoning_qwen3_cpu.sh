#!/usr/bin/env bash
# Long reasoning in BF16 and in FP16, with logits of a chosen size | trainer: FSDP2 | rollout: vLLM | a CPU | arXiv 2510.26788
# Writes the task, then trains in each precision. After an interruption the same command continues.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

############################ user-adjustable ############################
PYTHON=${PYTHON:-python}
PRECISIONS=${PRECISIONS:-bf16 fp16}
DOSES=${DOSES:-200} # sizes of the logits: 0, 20, 50, 70, 100, 200
ESTIMATOR=${ESTIMATOR:-pg_seq_is}
SEEDS=${SEEDS:-0}
#########################################################################

export VERL_PLATFORM=cpu
"$PYTHON" recipes/collapse/make_task.py outputs/collapse/task
CHOICES=()
for DOSE in $DOSES; do
    for PRECISION in $PRECISIONS; do
        CHOICES+=(--arm "${PRECISION}_$DOSE")
    done
done
for SEED in $SEEDS; do
    CHOICES+=(--seed "$SEED")
done
"$PYTHON" -m verl_precision.cli compare recipes/collapse/collapse.yaml "${CHOICES[@]}" \
    --parallel 2 "estimator=$ESTIMATOR" "$@"
