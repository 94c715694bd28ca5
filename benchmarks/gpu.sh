#!/usr/bin/env bash
# Run what needs a GPU: the tests of tests/gpu, and bench gpu. `make gpu` calls it.
#
# It needs no network. Where packages cannot be installed, put what the machine lacks as
# wheels into .whl/; they are unpacked into .site/, and Rollweave is used from src/.
# Every part has a time limit and a log in $OUT, so that one that hangs or fails does not
# cost the others. QUICK=1 leaves out the large models.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-gpu-results}
mkdir -p "$OUT"

if [ -x .venv/bin/python ]; then
  python=.venv/bin/python
else
  python=${PYTHON:-python3}
  if compgen -G '.whl/*.whl' > /dev/null; then
    $python -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target .site .whl/*.whl || exit
  fi
  export PYTHONPATH=.site:src
fi
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

failed=0
# part NAME SECONDS COMMAND...: run a command; its output goes to $OUT/NAME.log.
part() {
  local name=$1 limit=$2 status
  shift 2
  SECONDS=0
  timeout --kill-after=10 "$limit" "$@" > "$OUT/$name.log" 2>&1
  status=$?
  case $status in
    0) echo "$name: ok, $SECONDS s" ;;
    124 | 137) echo "$name: ended after $limit s" ;;
    *) echo "$name: failed with $status, $SECONDS s" ;;
  esac
  tail -n "${LINES_SHOWN:-25}" "$OUT/$name.log"
  return $status
}

# Without an installation, doctor reports the package itself as missing: not an error here.
part doctor 60 "$python" -m rollweave.cli.main doctor
part tests "${TESTS_S:-240}" "$python" -m pytest -p no:cacheprovider -p no:randomly -W default -q -rs tests/gpu tests/weights/test_staging.py || failed=1
part bench "${BENCH_S:-280}" "$python" -m rollweave.cli.main bench gpu --json ${QUICK:+--quick} || failed=1
grep '^{"bench"' "$OUT/bench.log" > "$OUT/bench.json" || failed=1
exit $failed
