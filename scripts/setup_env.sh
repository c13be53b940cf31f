#!/usr/bin/env bash
# Makes the virtual environment that quickstart.sh and test.sh run in. Skips everything when nothing changed.
#
#   PYTHON            Python 3.11 interpreter to build the environment from   (default: python3.11, then python3)
#   VENV              folder of the environment                              (default: .venv in the repository)
#   USE_GPU=1         install requirements.txt (CUDA) instead of requirements-cpu.txt
#   TORCH_CPU_INDEX   index of CPU builds of torch, asked when pip's own settings lead to no CPU build
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV="${VENV:-$PWD/.venv}"
USE_GPU="${USE_GPU:-0}"
TORCH_CPU_INDEX="${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}"
STAMP="$VENV/.setup-stamp"
REQUIREMENTS=requirements-cpu.txt
NEEDED_GIB=8
if [ "$USE_GPU" = 1 ]; then
  REQUIREMENTS=requirements.txt
  NEEDED_GIB=25
fi

say() { printf '[set-up] %s\n' "$*"; }
die() {
  printf '[set-up] cannot go on: %s\n' "$1" >&2
  shift
  for line in "$@"; do printf '[set-up]   %s\n' "$line" >&2; done
  exit 1
}

is_python311() { "$1" -c 'import sys; raise SystemExit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1; }

find_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    is_python311 "$PYTHON" || die "PYTHON=$PYTHON is not a working Python 3.11 (the pinned packages exist for 3.11)." \
      "Set PYTHON to a Python 3.11 interpreter, or leave it unset to search the path."
    echo "$PYTHON"
    return
  fi
  for candidate in python3.11 python3 python; do
    if is_python311 "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  die "no Python 3.11 on the path (the pinned packages exist for 3.11)." \
    "Debian/Ubuntu: apt-get install python3.11 python3.11-venv. Or, with pyenv or conda: install 3.11." \
    "Then run again, or name it: PYTHON=/path/to/python3.11 bash $0"
}

fingerprint() { # of everything that decides what gets installed
  { "$1" -VV; cat "$REQUIREMENTS" pyproject.toml scripts/setup_env.sh; printf '%s %s\n' "$PWD" "$USE_GPU"; } |
    "$1" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

check_machine() {
  [ "$(uname -s)" = Linux ] || [ "$USE_GPU" = 1 ] ||
    die "this is $(uname -s); vLLM's CPU wheels exist for Linux only." "Use a Linux machine or container with Python 3.11."
  command -v lscpu >/dev/null || die "the program lscpu is missing (vLLM asks it for the cores)." \
    "Debian/Ubuntu: apt-get install util-linux"
  mkdir -p "$(dirname "$VENV")" 2>/dev/null || die "cannot write $(dirname "$VENV")." "Set VENV to a folder that can be written."
  [ -d "$VENV" ] && return
  local free_kib
  free_kib=$(df -Pk "$(dirname "$VENV")" | awk 'NR == 2 { print $4 }')
  [ "$free_kib" -ge $((NEEDED_GIB * 1024 * 1024)) ] ||
    die "$((free_kib / 1024 / 1024)) GiB free where $VENV goes; the packages need $NEEDED_GIB GiB." \
      "Free some space, or set VENV to a folder on another disk."
}

make_venv() {
  if [ -x "$VENV/bin/python" ] && is_python311 "$VENV/bin/python"; then return; fi
  say "making the virtual environment $VENV"
  "$1" -m venv --clear "$VENV" || die "$1 could not make a virtual environment in $VENV." \
    "Debian/Ubuntu: apt-get install python3.11-venv. Otherwise see the message above."
}

pip_install() { # what it is for, then pip's arguments
  local purpose=$1 log
  shift
  log="$VENV/setup.log"
  say "installing $purpose"
  if "$VENV/bin/python" -m pip install --disable-pip-version-check --progress-bar off "$@" >"$log" 2>&1; then return; fi
  tail -n 15 "$log" >&2
  if grep -qE 'No space left on device' "$log"; then
    die "the disk is full." "Free some space (about $NEEDED_GIB GiB are needed for $VENV), or set VENV and TMPDIR to another disk."
  elif grep -qE 'NewConnectionError|NameResolutionError|from versions: none|ConnectTimeout|ReadTimeout|ProxyError|SSLError' "$log"; then
    die "pip cannot reach its package index (no network?)." \
      "Check the network and pip's settings (pip config list): a proxy, an index mirror or a folder of wheels go there."
  fi
  die "pip could not install $purpose." "The last lines above say why; the whole log is $log."
}

pip_finds_cpu_torch() { # whether pip's own settings (an index, a folder of wheels) lead to a CPU build of this version
  "$VENV/bin/python" -m pip index versions torch --disable-pip-version-check 2>/dev/null | grep -E "[ (]${1//./\\.}\+cpu(,|\)|$)" >/dev/null
}

installed_torch() { "$VENV/bin/python" -c "import importlib.metadata as m; print(m.version('torch'))" 2>/dev/null || true; }

install_cpu_torch() {
  local version
  version=$(sed -nE 's/^torch==([0-9.]+).*/\1/p' "$REQUIREMENTS")
  [ -n "$version" ] || die "$REQUIREMENTS names no torch==VERSION."
  if [ "$(installed_torch)" = "$version+cpu" ]; then
    return
  elif pip_finds_cpu_torch "$version"; then
    pip_install "torch $version (CPU build, found by pip's own settings)" --no-deps "torch==$version+cpu"
  else
    pip_install "torch $version (CPU build, from $TORCH_CPU_INDEX)" --no-deps --index-url "$TORCH_CPU_INDEX" "torch==$version+cpu"
  fi
}

install_gpu_packages() {
  # Transformer Engine's torch part is compiled against the torch that is there, so torch comes first. It is optional.
  local list=requirements.txt
  case "$(installed_torch)" in
  *+cpu) die "$VENV holds the CPU build of torch." "Remove that folder, or set VENV to another one for the GPU." ;;
  esac
  pip_install "torch, and what Transformer Engine is built with" "$(grep -E '^torch==' "$list")" setuptools wheel ninja pybind11
  if ! command -v nvcc >/dev/null; then
    say "no nvcc on the path: leaving out Transformer Engine; the plain torch layers are used instead"
    list="$VENV/requirements-without-te.txt"
    grep -v '^transformer-engine' requirements.txt >"$list"
  fi
  pip_install "the packages of requirements.txt" --no-build-isolation -r "$list"
}

install_cpu_packages() {
  install_cpu_torch
  pip_install "the packages of requirements-cpu.txt" -r requirements-cpu.txt
  drop_foreign_torch_packages
}

drop_foreign_torch_packages() {
  # vLLM's requirements bring builds of these for another torch; transformers then fails when it imports them.
  "$VENV/bin/python" -m pip uninstall --disable-pip-version-check -qy torchvision torchaudio torchcodec >/dev/null 2>&1 || true
}

main() {
  local python begin=$SECONDS
  for file in "$REQUIREMENTS" pyproject.toml; do
    [ -f "$file" ] || die "$PWD/$file is missing: this is not a whole clone of the repository."
  done
  python=$(find_python)
  if [ -f "$STAMP" ] && [ -x "$VENV/bin/python" ] && [ "$(cat "$STAMP")" = "$(fingerprint "$VENV/bin/python")" ]; then
    say "$VENV is up to date"
    return
  fi
  check_machine
  if [ "$USE_GPU" != 1 ] && command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
    say "there is an NVIDIA GPU here; this installs the CPU build. USE_GPU=1 installs requirements.txt for the GPU."
  fi
  say "setting up $VENV with $("$python" -V) (a few minutes the first time, about $NEEDED_GIB GiB)"
  make_venv "$python"
  exec 9>"$VENV/.setup-lock"
  if command -v flock >/dev/null; then flock 9; fi
  rm -f "$STAMP"
  if [ "$USE_GPU" = 1 ]; then install_gpu_packages; else install_cpu_packages; fi
  pip_install "rlhf_megatron itself" --no-deps -e .
  fingerprint "$VENV/bin/python" >"$STAMP"
  say "done in $((SECONDS - begin)) s"
}

main
