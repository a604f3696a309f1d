#!/usr/bin/env bash
# The sanity test in miniature (section 4) | trainer: FSDP2 | rollout: vLLM | a CPU | arXiv 2510.26788
# Writes the task, filters the problems, trains in each precision. The script uses an existing task and set again. An
# interrupted filter continues.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

############################ user-adjustable ############################
PYTHON=${PYTHON:-python}
PRECISIONS=${PRECISIONS:-bf16 fp16}
ESTIMATOR=${ESTIMATOR:-pg_seq_is}
FOLDER=outputs/sanity_arithmetic  # the folder in sanity_arithmetic.yaml
#########################################################################

export VERL_PLATFORM=cpu
COMMAND=("$PYTHON" -m verl_precision.cli)
if [[ ! -e $FOLDER/task ]]; then
    "$PYTHON" recipes/sanity_arithmetic/make_task.py "$FOLDER/task"
fi
if [[ ! -e $FOLDER/set/kept.parquet ]]; then
    "${COMMAND[@]}" sanity-set "$FOLDER/task/problems.jsonl" --model "$FOLDER/task/model" --output "$FOLDER/set" \
        --reward recipes/sanity_arithmetic/reward.py --max-prompt-tokens 8 --max-response-tokens 8
fi
CHOICES=()
for PRECISION in $PRECISIONS; do
    CHOICES+=(--precision "$PRECISION")
done
"${COMMAND[@]}" compare recipes/sanity_arithmetic/sanity_arithmetic.yaml "${CHOICES[@]}" --pass-score 0.95 \
    "estimator=$ESTIMATOR" "$@"
