#!/usr/bin/env bash
# Long reasoning in BF16 and in FP16, at logits of some size | trainer: FSDP2 | rollout: vLLM | a CPU | arXiv 2510.26788
# Builds the task, then trains in each precision. Stopped, the same command goes on.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

############################ user-adjustable ############################
PYTHON=${PYTHON:-python}
PRECISIONS=${PRECISIONS:-bf16 fp16}
ESTIMATORS=${ESTIMATORS:-pg_seq_is}
SEEDS=${SEEDS:-0}
LOGIT_SIZE=${LOGIT_SIZE:-100} # the dose: 0, 20, 50, 100, 200 or 300
#########################################################################

export VERL_PLATFORM=cpu
"$PYTHON" recipes/collapse/make_task.py outputs/collapse/task
CHOICES=()
for PRECISION in $PRECISIONS; do
    CHOICES+=(--precision "$PRECISION")
done
for ESTIMATOR in $ESTIMATORS; do
    CHOICES+=(--estimator "$ESTIMATOR")
done
for SEED in $SEEDS; do
    CHOICES+=(--seed "$SEED")
done
"$PYTHON" -m verl_precision.cli compare recipes/collapse/collapse.yaml "${CHOICES[@]}" \
    --side-by-side 2 "logit_size=$LOGIT_SIZE" "$@"
