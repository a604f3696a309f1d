#!/bin/sh
# Print a Python that the CPU wheels allow (3.11 or 3.12); PYTHON=... names one. Say clearly when there is none.
set -eu
for candidate in ${PYTHON:-python3.11 python3.12 python3 python}; do
  if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then
    echo "$candidate"
    exit 0
  fi
done
echo "error: no usable Python found (tried: ${PYTHON:-python3.11 python3.12 python3 python})." >&2
echo "The CPU wheels of torch and vLLM exist for Python 3.11 and 3.12. Install one of them, with its venv module, or name" >&2
echo "it: make quickstart PYTHON=/path/to/python3.11" >&2
exit 1
