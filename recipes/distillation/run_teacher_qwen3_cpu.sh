#!/usr/bin/env bash
# A teacher that is the student, and a student nearby: the noise of two engines | trainer: FSDP2 | rollout, teacher: vLLM | a CPU
# Writes the models, then trains. After an interruption the same command continues: finished runs are kept.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

############################ user-adjustable ############################
PYTHON=${PYTHON:-python}
ARMS=${ARMS:-near_fp16 near_bf16 bf16 fp16 exact bf16_topk} # or all: five more
#########################################################################

export VERL_PLATFORM=cpu
"$PYTHON" recipes/collapse/make_task.py outputs/collapse/task
"$PYTHON" recipes/distillation/make_models.py outputs/distillation/near
CHOICES=()
for ARM in $ARMS; do
    CHOICES+=(--arm "$ARM")
done
"$PYTHON" -m verl_precision.cli compare recipes/distillation/distillation.yaml "${CHOICES[@]}" --parallel 2 "$@"
"$PYTHON" recipes/distillation/read_noise.py outputs/distillation/*-* --figure outputs/distillation/distillation.png
