// silu(gate) * up.
#pragma once
#include "numbers.cuh"

namespace hydra {

// gate_up [rows, 2 * width], out [rows, width]; width is a multiple of a pack.
template <class T>
__global__ void silu_and_mul(const T* gate_up, T* out, int64_t rows, int64_t width) {
  constexpr int N = Pack<T>::N;
  const int64_t t = this_thread(), packs = width / N, row = t / packs, at = t % packs * N;
  if (row >= rows) return;
  const T* here = gate_up + row * 2 * width + at;
  const Pack<T> gate = load(here), up = load(here + width);
  Pack<T> made;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float x = wide(gate.x[i]);
    narrow(made.x[i], x / (1.0f + expf(-x)) * wide(up.x[i]));
  }
  store(out + row * width + at, made);
}

template <class T, class Stream>
void run_silu_and_mul(const T* gate_up, T* out, int64_t rows, int64_t width, Stream stream) {
  const int64_t threads = rows * (width / Pack<T>::N);
  if (threads) HYDRA_LAUNCH(silu_and_mul<T>, blocks_for(threads), THREADS, stream, gate_up, out, rows, width);
}

}  // namespace hydra
