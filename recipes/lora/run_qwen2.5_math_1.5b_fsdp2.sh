#!/usr/bin/env bash
# LoRA (section 5.2) | trainer: FSDP2 | rollout: vLLM | arXiv 2510.26788
# Data, hosts and pass bar: README.md beside this file. Every other setting: lora.yaml.
set -xeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

############################ user-adjustable ############################
PRECISION=${PRECISION:-fp16}  # bf16: the other half of the comparison
ESTIMATOR=${ESTIMATOR:-grpo_token_tis}
SCALE=${SCALE:-1x8_h100}  # cpu: the same code with a tiny model, in minutes
#########################################################################

bash recipes/launch/run.sh recipes/lora/lora.yaml \
    "precision=$PRECISION" "estimator=$ESTIMATOR" "scale=$SCALE" -- "$@"
