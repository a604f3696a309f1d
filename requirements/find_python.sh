#!/bin/sh
# Print a Python that the CPU wheels allow (3.11 or 3.12); PYTHON=... names one. If there is none, print why.
set -eu
tried=
for candidate in ${PYTHON:-python3.11 python3.12 python3 python}; do
  if said=$("$candidate" -c '
import sys
if sys.version_info[:2] not in ((3, 11), (3, 12)):
    sys.exit("verdict: is Python %d.%d" % sys.version_info[:2])
try:
    import ensurepip, venv
except ImportError:
    sys.exit("verdict: lacks the module venv or ensurepip (Debian, Ubuntu: apt install python%d.%d-venv)"
             % sys.version_info[:2])' 2>&1); then
    echo "$candidate"
    exit 0
  fi
  case $said in
  "verdict: "*) tried="$tried  $candidate ${said#verdict: }\n" ;;
  *) tried="$tried  $candidate does not run here\n" ;;
  esac
done
{
  echo "error: no usable Python found:"
  printf '%b' "$tried"
  echo "The CPU wheels of torch and vLLM exist for Python 3.11 and 3.12. Install one of them, with its venv module, or"
  echo "name it: make quickstart PYTHON=/path/to/python3.11"
} >&2
exit 1
