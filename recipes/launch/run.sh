#!/usr/bin/env bash
# Check a recipe, then run it: recipes/launch/run.sh recipes/NAME/NAME.yaml [OVERRIDE ...]
# Every other launcher ends here. It runs on one host, the head of a cluster if there is one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." # recipes name their files from the repository's root

############################ user-adjustable ############################
PYTHON=${PYTHON:-python}
CLUSTER=${CLUSTER:-}   # auto, or host:port: check every node of that Ray cluster before the start
DRY_RUN=${DRY_RUN:-0}  # 1: stop after the checks
#########################################################################

RECIPE=${1:?give a recipe, e.g. recipes/moe/moe.yaml}
shift
CHECK=("$PYTHON" -m verl_precision.cli check "$RECIPE" "$@")
if [[ -n $CLUSTER ]]; then
    CHECK+=(--cluster "$CLUSTER")
fi
set -x
"${CHECK[@]}"
if [[ $DRY_RUN == 1 ]]; then
    exit 0
fi
exec "$PYTHON" -m verl.trainer.main_ppo \
    --config-dir "$(dirname "$RECIPE")" --config-name "$(basename "$RECIPE" .yaml)" "$@"
