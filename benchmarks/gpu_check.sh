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
"$PY" -m pytest tests/gpu tests/ops tests/storage tests/runtime -m "gpu or cpu" -p no:cacheprovider \
  --junitxml="$OUT/gpu_tests.xml" || status=1
for dtype in float32 bfloat16; do
  "$PY" -m benchmarks.b03_step_overhead --device cuda --dtype "$dtype" --model "$MODELS/llava-small" \
    --out "$OUT/b03_step_overhead_cuda_$dtype.json" || status=1
done
"$PY" -m benchmarks.b07_transports --device cuda --rounds 40 --out "$OUT/b07_transports_cuda.json" || status=1
if "$PY" -c 'import nvidia.dali' 2>/dev/null; then
  "$PY" -m pytest tests/processor/pictures/test_dali.py -p no:cacheprovider -s --junitxml="$OUT/dali_tests.xml" || status=1
else
  echo "DALI is not installed: not run"
fi
exit $status
