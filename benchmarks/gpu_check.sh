#!/usr/bin/env bash
# Everything that needs a CUDA device, in one call: tests, measures. JSON goes to $OUT (default: benchmarks/results).
# Uses the environment's own python and torch; packages that are missing there may lie as wheels in $WHEELS.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-benchmarks/results}
MODELS=${MODELS:-/tmp/hydrainfer-gpu-check}
mkdir -p "$OUT"
PY=${PYTHON:-python3}
[ -n "${WHEELS:-}" ] && "$PY" -m pip install --quiet --no-index --no-deps "$WHEELS"/*.whl
"$PY" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' || { echo "no CUDA device: not run"; exit 3; }
status=0
export CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}
# First what only a GPU can tell. Each part has a limit, so that one that hangs leaves time for the others.
for part in ops cuda_transports cuda; do
  timeout 150 "$PY" -m pytest "tests/gpu/test_$part.py" -m gpu -p no:cacheprovider \
    --junitxml="$OUT/gpu_test_$part.xml" || status=1
done
if command -v compute-sanitizer >/dev/null; then
  timeout 150 compute-sanitizer --error-exitcode 1 "$PY" -m pytest tests/gpu/test_ops.py -m gpu -p no:cacheprovider \
    -k "bfloat16 and 28 and 128 or silu or migration" >"$OUT/sanitizer.txt" 2>&1 || status=1
fi
for dtype in float32 bfloat16; do
  timeout 120 "$PY" -m benchmarks.b03_step_overhead --device cuda --dtype "$dtype" --model "$MODELS/llava-small" \
    --out "$OUT/b03_step_overhead_cuda_$dtype.json" || status=1
done
timeout 120 "$PY" -m benchmarks.b07_transports --device cuda --rounds 40 --out "$OUT/b07_transports_cuda.json" || status=1
if "$PY" -c 'import nvidia.dali' 2>/dev/null; then
  "$PY" -m pytest tests/processor/pictures/test_dali.py -p no:cacheprovider -s --junitxml="$OUT/dali_tests.xml" || status=1
else
  echo "DALI is not installed: not run"
fi
exit $status
