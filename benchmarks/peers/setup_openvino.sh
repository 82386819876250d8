#!/bin/bash
# Builds two environments in $PEERS_HOME/openvino: `venv` serves with OpenVINO GenAI, `export` converts checkpoints. About
# four minutes and 3 GB. Does nothing if they are there already.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
DIR=${PEERS_HOME:-$HOME/.cache/hydrainfer-peers}/openvino
if [ -e "$DIR/ready" ]; then echo "$DIR is ready"; exit 0; fi
mkdir -p "$DIR"
for name in venv export; do [ -x "$DIR/$name/bin/python" ] || python3 -m venv "$DIR/$name"; done
PIP=("$DIR/venv/bin/python" -m pip install --quiet --disable-pip-version-check)
"${PIP[@]}" openvino==2026.4.1 openvino-genai==2026.4.1.0 openvino-tokenizers==2026.4.1.0 aiohttp pillow numpy jinja2

PIP=("$DIR/export/bin/python" -m pip install --quiet --disable-pip-version-check)
"${PIP[@]}" torch==2.13.0 # first: with the CPU build present, nothing below pulls gigabytes of CUDA
echo "torch==2.13.0+cpu" > "$DIR/constraints.txt"
"${PIP[@]}" --no-deps torchvision==0.28.0
"${PIP[@]}" -c "$DIR/constraints.txt" "transformers>=4.51,<5.6" "huggingface-hub<1.22" "nncf>=3.3.0" openvino==2026.4.1 \
  openvino-tokenizers==2026.4.1.0 "requests>=2.33,<3.0" setuptools pillow sentencepiece protobuf
"${PIP[@]}" --no-deps optimum-intel==2.2.0 "optimum~=2.3.0"
"$DIR/export/bin/python" "$HERE/patch_torchvision.py"
touch "$DIR/ready"
echo "$DIR is ready"
