#!/usr/bin/env bash
# One step of a session on a lent GPU (benchmarks/gpu), with the environment's own python and torch; packages that are
# missing there may lie as wheels in $WHEELS. JSON and a summary in words go to $OUT.
#   bash benchmarks/gpu_session.sh 1            on a GPU
#   bash benchmarks/gpu_session.sh 1 --device cpu    a dry run of every part of the step, with tiny shapes
set -uo pipefail
cd "$(dirname "$0")/.."
PY=${PYTHON:-python3}
[ -n "${WHEELS:-}" ] && "$PY" -m pip install --quiet --no-index --no-deps "$WHEELS"/*.whl
export CUDA_HOME=${CUDA_HOME:-/usr/local/cuda} PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
exec "$PY" -m benchmarks.gpu "$@" --out "${OUT:-benchmarks/results/gpu}"
