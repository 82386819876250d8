#!/usr/bin/env bash
# Steps of a session on a lent GPU (benchmarks/gpu), with the environment's own python and torch. Packages that it lacks
# are carried in $CARRIED, by default .gpu (benchmarks/gpu/carry.py). Results stay in one folder ($RESULTS); one archive
# of it and a summary go to $OUT.
#   bash benchmarks/gpu_session.sh look truth                 on a GPU
#   bash benchmarks/gpu_session.sh look truth --device cpu    a dry run of every part of these steps, with tiny shapes
set -uo pipefail
cd "$(dirname "$0")/.."
carried=${CARRIED:-.gpu} site=.cache/gpu-session/site
if [ -f "$carried/site.tar.gz" ]; then
    export HYDRAINFER_REVISION=${HYDRAINFER_REVISION:-$(cat "$carried/revision")} FLASHINFER_DISABLE_JIT=1
    if [ ! -d "$site" ] || [ "$carried/site.tar.gz" -nt "$site" ]; then
        rm -rf "$site" && mkdir -p "$site" && tar -xzf "$carried/site.tar.gz" -C "$site" --strip-components 1 && touch "$site"
    fi
    PYTHONPATH=$PWD/$site${PYTHONPATH:+:$PYTHONPATH}
fi
export CUDA_HOME=${CUDA_HOME:-/usr/local/cuda} PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1
exec "${PYTHON:-python3}" -m benchmarks.gpu "$@"
