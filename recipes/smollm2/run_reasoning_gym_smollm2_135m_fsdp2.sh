#!/usr/bin/env bash
# A pre-trained model in BF16 and in FP16 | trainer: FSDP2 | rollout: vLLM | a CPU, or SCALE=1x1_gpu | arXiv 2510.26788
# Writes the model and the problems, keeps the problems that the model solves sometimes, trains in each precision. After
# an interruption the same command continues.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

############################ user-adjustable ############################
PYTHON=${PYTHON:-python}
SCALE=${SCALE:-cpu}
PRECISIONS=${PRECISIONS:-bf16 fp16}
ESTIMATORS=${ESTIMATORS:-pg_seq_is}
SEEDS=${SEEDS:-0}
PARALLEL=${PARALLEL:-2} # runs at the same time on a CPU; each has its share of the cores and 9 GB of memory
TASKS=${TASKS:-chain_sum products}
LEVELS=${LEVELS:-0}
PROBLEMS=${PROBLEMS:-1500} # for each task and level, before the filter
RESPONSES=${RESPONSES:-8}   # for each problem, in the filter
FOLDER=outputs/smollm2      # the folder in smollm2.yaml
#########################################################################

COMMAND=("$PYTHON" -m verl_precision.cli)
CHOICES=("scale=$SCALE")
if [[ $SCALE == cpu ]]; then
    export VERL_PLATFORM=cpu
    CHOICES+=(--parallel "$PARALLEL")
    DTYPE=fp32 # for the filter: every CPU is fast in this dtype
else
    DTYPE=bf16
    CHOICES+=(arithmetic=native)
fi
if [[ ! -e $FOLDER/model ]]; then
    "${COMMAND[@]}" data smollm2_135m_instruct --output "$FOLDER/model"
fi
# These two commands use the files of an earlier call again, and refuse files that were made with other choices.
NAMES=()
for TASK in $TASKS; do
    NAMES+=(--task "$TASK")
done
for LEVEL in $LEVELS; do
    NAMES+=(--level "$LEVEL")
done
"${COMMAND[@]}" data reasoning_gym "${NAMES[@]}" --size "$PROBLEMS" --output "$FOLDER"
"${COMMAND[@]}" sanity-set "$FOLDER/reasoning_gym.parquet" --model "$FOLDER/model" --output "$FOLDER/set" \
    --reward pkg://verl_precision.tools.rewards.reasoning_gym_answer -n "$RESPONSES" --dtype "$DTYPE" \
    --max-prompt-tokens 96 --max-response-tokens 32
for PRECISION in $PRECISIONS; do
    CHOICES+=(--precision "$PRECISION")
done
for SEED in $SEEDS; do
    CHOICES+=(--seed "$SEED")
done
for ESTIMATOR in $ESTIMATORS; do
    "${COMMAND[@]}" compare recipes/smollm2/smollm2.yaml "${CHOICES[@]}" "estimator=$ESTIMATOR" "$@"
done
