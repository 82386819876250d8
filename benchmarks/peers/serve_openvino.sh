#!/bin/bash
# serve_openvino.sh MODEL_DIR PORT [flags of openvino_server.py]: serves in the foreground under the model name "m". The
# checkpoint is converted the first time. Environment: DTYPE=float32, THREADS=2, PEERS_HOME.
set -eu
MODEL=$1 PORT=$2
shift 2
HERE=$(cd "$(dirname "$0")" && pwd)
DIR=${PEERS_HOME:-$HOME/.cache/hydrainfer-peers}/openvino
KEY=$(cat "$MODEL"/*.json <(tail -qc 1000000 "$MODEL"/*.safetensors) | md5sum | head -c 8) # of one name are many
OUT=$DIR/exported/$(basename "$MODEL")-$KEY
if [ ! -e "$OUT/done" ]; then
  "$DIR/export/bin/optimum-cli" export openvino -m "$MODEL" --task image-text-to-text --weight-format fp32 "$OUT" >&2
  touch "$OUT/done"
fi
PRECISION=f32
case ${DTYPE:-float32} in
  float32) ;;
  bfloat16) # without instructions for it, OpenVINO computes in float32 and refuses a KV cache of bf16
    if grep -qwE 'avx512_bf16|amx_bf16' /proc/cpuinfo; then PRECISION=bf16; fi ;;
  *) echo "no precision of OpenVINO's for $DTYPE" >&2; exit 2 ;;
esac
exec "$DIR/venv/bin/python" "$HERE/openvino_server.py" "$OUT" "$PORT" --precision "$PRECISION" --threads "${THREADS:-2}" "$@"
