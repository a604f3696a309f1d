#!/usr/bin/env bash
# Training x rollout precision (section 4.4, Figure 5) | trainer: FSDP2 | rollout: vLLM | arXiv 2510.26788
# Data, hosts and pass bar: README.md beside this file. Every other setting: precision_ablation.yaml, sanity.yaml.
set -xeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

############################ user-adjustable ############################
# The cells of Figure 5; README.md has the other presets of the grid
PRECISIONS=${PRECISIONS:-bf16 bf16_train_fp16_rollout bf16_train_fp32_rollout fp16}
ESTIMATOR=${ESTIMATOR:-grpo}
SCALE=${SCALE:-1x8_a100}  # cpu: the same code with a tiny model, in minutes
#########################################################################

for PRECISION in $PRECISIONS; do
    bash recipes/launch/run.sh recipes/precision_ablation/precision_ablation.yaml \
        "precision=$PRECISION" "estimator=$ESTIMATOR" "scale=$SCALE" "$@"
done
