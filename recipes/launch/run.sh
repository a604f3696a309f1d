#!/usr/bin/env bash
# Check a recipe, then run it: recipes/launch/run.sh recipes/NAME/NAME.yaml [PRESET ... --] [OVERRIDE ...]
# Presets before -- are a script's defaults: a preset that is given again after -- replaces the default.
# Every other launcher calls this script. It runs on one host, the head of a cluster if there is a cluster.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." # paths in recipes start at the repository's root

############################ user-adjustable ############################
PYTHON=${PYTHON:-python}
CLUSTER=${CLUSTER:-}   # auto, or host:port: check every node of that Ray cluster before the start, and watch the nodes during the run
DRY_RUN=${DRY_RUN:-0}  # 1: stop after the checks
# The metrics file is $VERL_FILE_LOGGER_ROOT/PROJECT/EXPERIMENT.jsonl: by default beside the run's checkpoints.
export VERL_FILE_LOGGER_ROOT=${VERL_FILE_LOGGER_ROOT:-checkpoints}
#########################################################################

RECIPE=${1:?give a recipe, e.g. recipes/moe/moe.yaml}
shift
OWN=()
KEPT=()
for WORD in "$@"; do # words may have spaces
    if [[ $WORD == -- ]]; then
        while [[ $1 != -- ]]; do
            OWN+=("$1")
            shift
        done
        shift
        break
    fi
done
for PRESET in "${OWN[@]}"; do
    for WORD in "$@"; do
        [[ $WORD != "${PRESET%%=*}="* ]] || continue 2
    done
    KEPT+=("$PRESET")
done
set -- "${KEPT[@]}" "$@"
RUN=("$PYTHON" -m verl.trainer.main_ppo
    --config-dir "$(dirname -- "$RECIPE")" --config-name "$(basename -- "$RECIPE" .yaml)" "$@")
CHECK=("$PYTHON" -m verl_precision.cli check "$RECIPE" "$@")
if [[ -n $CLUSTER ]]; then
    CHECK+=(--cluster "$CLUSTER")
    RUN=("$PYTHON" recipes/launch/watched_run.py "$CLUSTER" "${RUN[@]}") # ends with code 75 when a node is lost
fi
set -x
"${CHECK[@]}"
if [[ $DRY_RUN == 1 ]]; then
    exit 0
fi
exec "${RUN[@]}"
