#!/usr/bin/env bash
# Submit a recipe as a job to a running Ray cluster: recipes/launch/job_submit.sh recipes/NAME/NAME.yaml [OVERRIDE ...]
# The job runs on the head, from the same repository folder as here (a shared file system, or the same path on the head).
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

############################ user-adjustable ############################
RAY=${RAY:-ray}
DASHBOARD=${DASHBOARD:-http://127.0.0.1:8265}  # of the head
ON_CLUSTER=${ON_CLUSTER:-$ROOT}                # the repository's folder on the head
#########################################################################

: "${1:?give a recipe, e.g. recipes/moe/moe.yaml}"
set -x
exec "$RAY" job submit --address "$DASHBOARD" -- env CLUSTER=auto bash "$ON_CLUSTER/recipes/launch/run.sh" "$@"
