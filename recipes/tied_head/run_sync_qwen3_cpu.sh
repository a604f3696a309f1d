#!/usr/bin/env bash
# vLLM-CPU's tied head: repaired, stopped by the guard, and in silence | trainer: FSDP2 | rollout: vLLM | a CPU
# After an interruption the same command continues: finished runs are kept.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

############################ user-adjustable ############################
PYTHON=${PYTHON:-python}
OUTPUT=${OUTPUT:-outputs}  # a folder tied_head is made in it
#########################################################################

export VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=recipes.tied_head.left_out PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
compare() {
    "$PYTHON" -m verl_precision.cli compare recipes/tied_head/tied_head.yaml --output "$OUTPUT" "$@"
}
compare --arm repaired --arm unguarded --parallel 2 "$@"
echo "The next run is to be ended by the guard, at its first weight sync with new weights:"
if compare --arm guarded "$@"; then
    echo "error: the guard has let a run pass whose head is stale" >&2
    exit 1
fi
"$PYTHON" recipes/tied_head/read_curves.py "$OUTPUT"/tied_head/*-* --figure "$OUTPUT/tied_head/tied_head.png"
