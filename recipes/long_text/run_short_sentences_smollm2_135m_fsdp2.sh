#!/usr/bin/env bash
# Length alone: SmolLM2-135M on texts of 1,024 tokens | trainer: FSDP2 | rollout: vLLM | one GPU, or SCALE=cpu
# Writes the model, then trains with each estimator in each precision. After an interruption the same command continues.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

############################ user-adjustable ############################
PYTHON=${PYTHON:-python}
SCALE=${SCALE:-1x1_gpu}
PRECISIONS=${PRECISIONS:-bf16 fp16}
ESTIMATORS=${ESTIMATORS:-pg_seq_is grpo_token_tis}
SEEDS=${SEEDS:-0}
MODEL=outputs/smollm2/model # the path in long_text.yaml
#########################################################################

COMMAND=("$PYTHON" -m verl_precision.cli)
CHOICES=("scale=$SCALE")
if [[ $SCALE == cpu ]]; then
    export VERL_PLATFORM=cpu
fi
if [[ ! -e $MODEL ]]; then
    "${COMMAND[@]}" data smollm2_135m_instruct --output "$MODEL"
fi
for PRECISION in $PRECISIONS; do
    CHOICES+=(--precision "$PRECISION")
done
for SEED in $SEEDS; do
    CHOICES+=(--seed "$SEED")
done
for ESTIMATOR in $ESTIMATORS; do
    "${COMMAND[@]}" compare recipes/long_text/long_text.yaml "${CHOICES[@]}" "estimator=$ESTIMATOR" "$@"
done
