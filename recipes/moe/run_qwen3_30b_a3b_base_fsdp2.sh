#!/usr/bin/env bash
# RL of a mixture of experts (section 5.1, Table 3) | trainer: FSDP2 | rollout: vLLM | arXiv 2510.26788
# Data, hosts and pass bar: README.md beside this file. Every other setting: moe.yaml.
set -xeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

############################ user-adjustable ############################
PRECISION=${PRECISION:-fp16}  # bf16: the other half of the comparison
ESTIMATOR=${ESTIMATOR:-grpo_seq_mis}
SCALE=${SCALE:-8x8_h100}  # cpu: the same code with a tiny model, in minutes
#########################################################################

bash recipes/launch/run.sh recipes/moe/moe.yaml \
    "precision=$PRECISION" "estimator=$ESTIMATOR" "scale=$SCALE" -- "$@"
