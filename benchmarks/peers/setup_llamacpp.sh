#!/bin/bash
# Builds llama-server in $PEERS_HOME/llamacpp/source: llama.cpp of August 2026 with `llamacpp.patch`. Some ten minutes. Does
# nothing if it is there already. A source tree that lies there is taken as it is; else it is fetched by git.
# Environment: JOBS=2.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
DIR=${PEERS_HOME:-$HOME/.cache/hydrainfer-peers}/llamacpp
SOURCE=$DIR/source COMMIT=3f545beccee69d9975f466ec7e45fd9aacd8ba90
if [ -e "$DIR/ready" ]; then echo "$DIR is ready"; exit 0; fi
if [ ! -e "$SOURCE/CMakeLists.txt" ]; then
  git init --quiet "$SOURCE"
  git -C "$SOURCE" fetch --quiet --depth 1 https://github.com/ggml-org/llama.cpp "$COMMIT"
  git -C "$SOURCE" checkout --quiet FETCH_HEAD
fi
[ -e "$DIR/patched" ] || patch --directory "$SOURCE" --strip 1 --silent --input "$HERE/llamacpp.patch"
touch "$DIR/patched"

# cmake, ninja and what writes GGUF files
[ -x "$DIR/venv/bin/python" ] || python3 -m venv "$DIR/venv"
"$DIR/venv/bin/python" -m pip install --quiet --disable-pip-version-check cmake ninja numpy safetensors pyyaml requests tqdm
export PATH=$DIR/venv/bin:$PATH
OFF=()
for option in LLAMA_{CURL,OPENSSL,BUILD_UI,USE_PREBUILT_UI,BUILD_TESTS,BUILD_EXAMPLES,BUILD_APP} BUILD_SHARED_LIBS; do
  OFF+=("-D$option=OFF")
done
cmake -S "$SOURCE" -B "$SOURCE/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON "${OFF[@]}"
cmake --build "$SOURCE/build" --target llama-server --parallel "${JOBS:-2}"
touch "$DIR/ready"
echo "$DIR is ready"
