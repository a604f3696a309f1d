#!/usr/bin/env bash
# Another model family (section 5.4) | trainer: FSDP2 | rollout: vLLM | arXiv 2510.26788
# Data, hosts and pass bar: README.md beside this file. Every other setting: octothinker.yaml.
set -xeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

############################ user-adjustable ############################
PRECISION=${PRECISION:-fp16}  # bf16: the other half of the comparison
ESTIMATOR=${ESTIMATOR:-grpo}
SCALE=${SCALE:-1x8_h100}  # cpu: the same code with a tiny model, in minutes
#########################################################################

bash recipes/launch/run.sh recipes/octothinker/octothinker.yaml \
    "precision=$PRECISION" "estimator=$ESTIMATOR" "scale=$SCALE" -- "$@"
