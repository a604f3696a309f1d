#!/usr/bin/env bash
# Length alone: one model, four lengths of reasoning, two precisions, two estimators | trainer: FSDP2 | rollout: vLLM | a CPU
# Writes the task, then trains. The same command continues after an interruption, and never repeats a finished run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

############################ user-adjustable ############################
PYTHON=${PYTHON:-python}
LENGTHS=${LENGTHS:-128 512 2048 8192} # tokens of reasoning
PRECISIONS=${PRECISIONS:-bf16 fp16}
ESTIMATORS=${ESTIMATORS:-pg_seq_is grpo_token_tis}
SEEDS=${SEEDS:-0}
#########################################################################

export VERL_PLATFORM=cpu
"$PYTHON" recipes/reasoning_length/make_task.py outputs/reasoning_length/task
CHOICES=()
for TOKENS in $LENGTHS; do
    for ESTIMATOR in $ESTIMATORS; do
        for PRECISION in $PRECISIONS; do
            CHOICES+=(--arm "${PRECISION}_${ESTIMATOR}_$TOKENS")
        done
    done
done
for SEED in $SEEDS; do
    CHOICES+=(--seed "$SEED")
done
"$PYTHON" -m verl_precision.cli compare recipes/reasoning_length/reasoning_length.yaml "${CHOICES[@]}" --parallel 2 --once "$@"
