#!/bin/sh
# install.sh VENV LOCK: make a virtual environment with exactly the locked packages, and this package in it, editable.
# Byte code is compiled at once, on all cores: nine processes of a run import the same packages.
# --no-deps: the lock is complete, and what it leaves out on purpose (see refresh_lock.sh) must stay out.
set -eu
venv=$1
lock=$2
here=$(dirname "$0")
python=$(sh "$here/find_python.sh")
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
echo "installing $(grep -c == "$lock") pinned packages into $venv (some minutes, once) ..."
log=$venv/install.log
if ! "$venv/bin/python" -m pip install --disable-pip-version-check --no-deps --no-compile -r "$lock" >"$log" 2>&1; then
  tail -n 15 "$log" >&2
  echo "error: installation failed; the whole log is $log." >&2
  echo "If torch's +cpu build was not found, add PyTorch's CPU wheel index to pip's settings (README.md, Install)." >&2
  exit 1
fi
"$venv/bin/python" -m compileall -q -j 0 "$venv/lib" >>"$log" 2>&1 || true  # some packages ship templates that do not compile
"$venv/bin/python" -m pip install --disable-pip-version-check --no-deps --no-build-isolation -q -e "$here/.."
