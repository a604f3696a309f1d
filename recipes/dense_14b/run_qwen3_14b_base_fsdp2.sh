#!/usr/bin/env bash
# DAPO on a large dense model (section 5.3, Table 3) | trainer: FSDP2 | rollout: vLLM | arXiv 2510.26788
# Data, hosts and pass bar: README.md beside this file. Every other setting: dense_14b.yaml.
set -xeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

############################ user-adjustable ############################
PRECISION=${PRECISION:-fp16}  # bf16: the other half of the comparison
ESTIMATOR=${ESTIMATOR:-dapo}
SCALE=${SCALE:-8x8_h100}  # cpu: the same code with a tiny model, in minutes
#########################################################################

bash recipes/launch/run.sh recipes/dense_14b/dense_14b.yaml \
    "precision=$PRECISION" "estimator=$ESTIMATOR" "scale=$SCALE" -- "$@"
