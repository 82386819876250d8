#!/bin/bash
# serve_llamacpp.sh MODEL_DIR PORT [llama-server flags]: serves in the foreground under the model name "m". The checkpoint is
# converted the first time. Environment: LLAMA_SERVER=llama-server (the program of an installed package), DTYPE=float32,
# WEIGHTS=f32 or bf16 by that (or q8_0), THREADS=2, SLOTS=4 (running requests), LEN=4096 (context of each), PEERS_HOME.
set -eu
MODEL=$1 PORT=$2
shift 2
HERE=$(cd "$(dirname "$0")" && pwd)
DIR=${PEERS_HOME:-$HOME/.cache/hydrainfer-peers}/llamacpp
case ${DTYPE:-float32} in
  float32) TYPE=f32 ;;
  bfloat16) TYPE=bf16 ;;
  *) echo "no type of llama.cpp's for $DTYPE" >&2; exit 2 ;;
esac
WEIGHTS=${WEIGHTS:-$TYPE}
KEY=$(cat "$MODEL"/*.json <(tail -qc 1000000 "$MODEL"/*.safetensors) | md5sum | head -c 8) # of one name are many
OUT=$DIR/converted/$(basename "$MODEL")-$KEY-$WEIGHTS
if [ ! -e "$OUT/done" ]; then
  "$HERE/../../.venv/bin/python" "$HERE/llava_to_gguf.py" "$MODEL" "$OUT" --weights "$WEIGHTS" >&2
  touch "$OUT/done"
fi
exec "${LLAMA_SERVER:-llama-server}" -m "$OUT/text.gguf" --mmproj "$OUT/vision.gguf" -a m --host 127.0.0.1 \
  --port "$PORT" -np "${SLOTS:-4}" -c $((${LEN:-4096} * ${SLOTS:-4})) -t "${THREADS:-2}" -tb "${THREADS:-2}" \
  -ctk "$TYPE" -ctv "$TYPE" --cache-ram 0 "$@"
