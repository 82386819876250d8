#!/bin/bash
# serve_vllm.sh MODEL_DIR PORT [vllm flags]: serves in the foreground on both cores, under the model name "m".
# Environment: DTYPE=float32, EAGER=1 (0 compiles: a start of minutes and no clear gain), KV=1 (GiB of KV cache),
# LEN=4096 (context), SEQS=16 (running requests), BIND=0-1 (cores), PEERS_HOME.
set -eu
MODEL=$1 PORT=$2
shift 2
VENV=${PEERS_HOME:-$HOME/.cache/hydrainfer-peers}/venv
export PATH=$VENV/bin:$PATH
export VLLM_CPU_KVCACHE_SPACE=${KV:-1} VLLM_CPU_OMP_THREADS_BIND=${BIND:-0-1}
export VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
TCMALLOC=/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4
[ -e "$TCMALLOC" ] || TCMALLOC=""
export LD_PRELOAD=${TCMALLOC:+$TCMALLOC:}$VENV/lib/libiomp5.so
EAGER_FLAG=()
[ "${EAGER:-1}" = 1 ] && EAGER_FLAG=(--enforce-eager)
exec "$VENV/bin/vllm" serve "$MODEL" --served-model-name m --host 127.0.0.1 --port "$PORT" --dtype "${DTYPE:-float32}" \
  --max-model-len "${LEN:-4096}" --max-num-seqs "${SEQS:-16}" "${EAGER_FLAG[@]}" "$@"
