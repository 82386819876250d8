#!/usr/bin/env bash
# Steps of a session on a lent GPU (benchmarks/gpu), with the environment's own python and torch. Packages that it lacks
# may lie in a folder on PYTHONPATH. Results stay in one folder ($RESULTS); one archive of it and a summary go to $OUT.
#   bash benchmarks/gpu_session.sh look truth                 on a GPU
#   bash benchmarks/gpu_session.sh look truth --device cpu    a dry run of every part of these steps, with tiny shapes
set -uo pipefail
cd "$(dirname "$0")/.."
export CUDA_HOME=${CUDA_HOME:-/usr/local/cuda} PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1
exec "${PYTHON:-python3}" -m benchmarks.gpu "$@"
