#!/usr/bin/env bash
# Set-up, static checks, then all tests that need no GPU and no Slurm. Further arguments go to pytest, for example:
#   bash scripts/test.sh -k shift -x
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV="${VENV:-$PWD/.venv}"

VENV="$VENV" bash scripts/setup_env.sh || exit 1
export PATH="$VENV/bin:$PATH"
# The tests start up to four ranks; more threads than cores make each of them slower.
export OMP_NUM_THREADS=1
# vLLM's few compiled kernels take longer to compile than the tests run, and would need a C++ compiler.
export TORCH_COMPILE_DISABLE=1

summary=()
failed=0

run() { # name, then the command
  local name=$1 begin=$SECONDS code
  shift
  printf '\n[test] %s: %s\n' "$name" "$*"
  "$@"
  code=$?
  # pytest's code 5: no test was selected, which is fine when the caller selects.
  if [ $code -eq 5 ] && [ "$selecting" = yes ]; then code=0; fi
  if [ $code -eq 0 ]; then
    summary+=("$(printf '%-14s ok      %4d s' "$name" $((SECONDS - begin)))")
  else
    summary+=("$(printf '%-14s FAILED  %4d s  (exit code %d)' "$name" $((SECONDS - begin)) $code)")
    failed=1
  fi
}

selecting=no
[ $# -eq 0 ] || selecting=yes
begin=$SECONDS
run check make check
for tier in unit architecture distributed convert e2e; do
  if [ -n "$(find "tests/$tier" -name 'test_*.py' -print -quit 2>/dev/null)" ]; then
    run "$tier" python -m pytest "tests/$tier" -q --durations=10 "$@"
  fi
done

printf '\n[test] summary\n'
printf '  %s\n' "${summary[@]}"
printf '  total %d s\n' $((SECONDS - begin))
exit $failed
