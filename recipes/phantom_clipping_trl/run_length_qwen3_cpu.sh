#!/usr/bin/env bash
# Phantom clipping on TRL | trainer: AsyncGRPOTrainer in FP32 | rollout: vLLM in BF16 | a CPU | TRL 1.16.0
# Needs the environment that `make phantom-trl` makes. After an interruption the same command continues.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

############################ user-adjustable ############################
PYTHON=${PYTHON:-outputs/venv-trl/bin/python}
ARMS=${ARMS:-clipped shadow fp32} # names of run_arms.py's arms, or all
SEEDS=${SEEDS:-0}
STEPS=${STEPS:-81}
OUTPUT=${OUTPUT:-outputs/phantom_clipping_trl}
#########################################################################

[ "$ARMS" != all ] || ARMS=$("$PYTHON" recipes/phantom_clipping_trl/run_arms.py --list)
# shellcheck disable=SC2046,SC2086 # names and seeds are separate words
"$PYTHON" recipes/phantom_clipping_trl/run_arms.py --steps "$STEPS" --output "$OUTPUT" \
    $(printf -- '--arm %s ' $ARMS) $(printf -- '--seed %s ' $SEEDS) "$@"
"$PYTHON" recipes/phantom_clipping_trl/read_thread.py "$OUTPUT"
