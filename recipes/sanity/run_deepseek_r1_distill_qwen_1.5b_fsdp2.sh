#!/usr/bin/env bash
# The sanity test (section 4) | trainer: FSDP2 | rollout: vLLM | arXiv 2510.26788
# Data, hosts and pass bar: README.md beside this file. Every other setting: sanity.yaml.
set -xeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

############################ user-adjustable ############################
PRECISION=${PRECISION:-fp16}  # bf16: the other half of the comparison
ESTIMATOR=${ESTIMATOR:-pg_seq_is}
SCALE=${SCALE:-1x8_a100}  # cpu: the same code with a tiny model, in minutes
#########################################################################

bash recipes/launch/run.sh recipes/sanity/sanity.yaml \
    "precision=$PRECISION" "estimator=$ESTIMATOR" "scale=$SCALE" -- "$@"
