#!/bin/sh
# install.sh VENV LOCK: make a virtual environment with exactly the locked packages, and this package in it, editable.
#
# pip is tried first, with its own settings, because a machine may have its own source of wheels. If pip sees no torch
# of the pinned version (no default index has its +cpu build), uv installs instead: uv knows PyTorch's index by name.
# --no-deps: the lock is complete, and packages that it leaves out on purpose (see refresh_lock.sh) must stay out.
# VENV/.unfinished exists from the first change to the last. A call that finds this file starts again from nothing,
# because an installer that was killed leaves packages that look complete and are not.
set -eu
UV=uv==0.13.9 # pinned, like all packages: another release may read --torch-backend or the lock in another way
venv=$1
lock=$2
here=$(dirname "$0")
base=$(sh "$here/find_python.sh")
python=$venv/bin/python
log=$venv/install.log
start=$(date +%s)
export PIP_DISABLE_PIP_VERSION_CHECK=1
job='' watcher=''
trap 'kill $job $watcher 2>/dev/null || true' EXIT
trap 'echo "stopped; the next call starts again" >&2; exit 130' INT TERM HUP

# fail CAUSE REMEDY...: print the end of the log, the cause and the remedy, ten lines at most, and exit.
fail() {
  tail -n 4 "$log" 2>/dev/null | cut -c 1-300 >&2
  echo "error: $1" >&2
  shift
  printf '%s\n' "$@" >&2
  exit 1
}

# Print the progress every few seconds, until the job or this script has ended.
watch() {
  while sleep "${PROGRESS_SECONDS:-10}" >/dev/null 2>&1; kill -0 "$1" && kill -0 $$; do
    found=$(find "$venv"/lib/python3*/site-packages -maxdepth 1 -name '*.dist-info' | wc -l)
    said=$(grep -v "^WARNING" "$log" | tail -n 1 | cut -c 1-90)
    echo "  $(($(date +%s) - start)) s: $found packages in place; $said"
  done 2>/dev/null
}

# run WHAT COMMAND...: run a command, and log its output. It runs in the background, so that a signal acts at once.
run() {
  echo "$1 ..." >>"$log"
  shift
  "$@" >>"$log" 2>&1 &
  job=$!
  watch $job 9>&- &
  watcher=$!
  status=0
  wait $job || status=$?
  kill $watcher 2>/dev/null || true
  job='' watcher=''
  return $status
}

usable() {
  [ ! -e "$venv/.unfinished" ] && "$python" -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)' &&
    "$python" -m pip install --help
} >/dev/null 2>&1

# pip_setting NAME: print the value of a setting in pip's configuration files and variables, if it has one.
pip_setting() { "$python" -m pip config list | sed -n "s/^.*[.]$1='\(.*\)'\$/\1/p" | head -n 1; }

[ -z "$(ls -A "$venv" 2>/dev/null)" ] || [ -e "$venv/pyvenv.cfg" ] || [ -e "$log" ] ||
  fail "$venv is there and is no virtual environment." "Name another folder, or remove this one."
total=$(grep -c '^[^#]*==' "$lock") || fail "no pinned packages in $lock." "Name a lock of requirements/."
mkdir -p "$venv"
# One installation at a time. The log is the lock file: the installer holds it too, even if this script is killed.
exec 9>>"$log"
"$base" - "$venv" 3<&9 <<'PYTHON'
import fcntl, sys
try:
    fcntl.flock(3, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print(f"another installation into {sys.argv[1]} is at work; waiting for it ...", flush=True)
    fcntl.flock(3, fcntl.LOCK_EX)
except OSError as error:
    print(f"warning: this file system has no locks ({error}): install into {sys.argv[1]} from one shell at a time")
PYTHON
: >"$log"

if ! usable; then
  [ -z "$(find "$venv/" -mindepth 1 -maxdepth 1 ! -name install.log)" ] || echo "$venv is incomplete: removing it"
  echo "making $venv with $base"
  touch "$venv/.unfinished"
  find "$venv/" -mindepth 1 -maxdepth 1 ! -name install.log ! -name .unfinished -exec rm -rf {} +
  run "making $venv" "$base" -m venv "$venv" ||
    fail "$base -m venv $venv failed." "Is the disk full (df -h), or the folder read-only?"
fi
touch "$venv/.unfinished"

# Test whether pip, with its own settings, sees the pinned torch for this Python.
sees_torch() {
  run "asking pip for torch" "$python" -m pip index versions torch || return 1
  sed -n 's/^Available versions: //p' "$log" | tr -s ', ' '\n' | grep -qxF "$torch"
}

torch=$(sed -n 's/^torch==\([^ ;]*\).*/\1/p' "$lock")
again="Then run the same command again: what was downloaded is kept. The whole log is $log."
if [ -z "$torch" ] || sees_torch; then
  echo "installing $total pinned packages into $venv with pip (some minutes, once); log: $log"
  run "starting pip" "$python" -m pip install --no-deps --no-compile --progress-bar off -r "$lock" ||
    fail "pip could not install $lock." "Check network, disk (df -h) and pip's settings (pip config list). $again"
else
  echo "pip sees no torch==$torch: installing $total pinned packages into $venv with uv, once; log: $log"
  run "installing $UV" "$python" -m pip install -q "$UV" ||
    fail "pip sees neither torch==$torch nor $UV." \
      "Can this machine reach the package index (network, HTTPS_PROXY, pip config list)? $again"
  # uv does not read pip's settings, but needs pip's mirror of the package index and its certificate.
  index=$(pip_setting index-url) cert=$(pip_setting cert)
  [ -z "$index" ] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}"
  [ -z "$cert" ] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$cert}"
  run "starting uv" "$python" -m uv pip install --python "$python" --no-deps --torch-backend=cpu -r "$lock" ||
    fail "uv could not install $lock." "If PyTorch's index cannot be reached: allow access, or give pip a source of" \
      "torch==$torch (pip config set global.find-links FOLDER, or global.extra-index-url URL)." "$again"
fi
# Compile all packages now, on all cores: nine processes of a run import them. Some have templates that do not compile.
# Without the lock: if the compiler is killed, its own processes stay, and wait for work for ever.
run "compiling to byte code" "$python" -m compileall -q -j 0 "$venv/lib" 9>&- || true
run "installing this package" "$python" -m pip install --no-deps --no-build-isolation -q -e "$here/.." ||
  fail "this package could not be installed." "$again"
rm "$venv/.unfinished"
echo "installed into $venv in $(($(date +%s) - start)) s"
