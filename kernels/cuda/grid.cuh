// The gated convolution of a vision tower over its grids of patches.
#pragma once
#include "numbers.cuh"

namespace hydra {

// `rows` [n, 3 * channels]: a gate, another gate, and x; `weight` [channels, K, K]; `out` [n, channels]: the convolution of
// gate * x over the patches of a row's frame, times the other gate. `places`, `sizes` [n, 2]: a row's place in its frame,
// and the frame's height and width, in patches. Squares of merge x merge patches lie one after the other.
template <class T>
struct GridArgs {
  const T *rows, *weight;
  const float *places, *sizes;
  T* out;
  int64_t n, channels;
  int merge;
};

__device__ inline int row_in_frame(int y, int x, int width, int merge) {
  return (y / merge * (width / merge) + x / merge) * merge * merge + y % merge * merge + x % merge;
}

// A thread has one pack of channels of a row.
template <class T, int K>
__global__ void __launch_bounds__(THREADS, 3) grid_conv(GridArgs<T> a) {
  constexpr int N = Pack<T>::N, KK = K * K;
  const int64_t t = this_thread(), packs = a.channels / N, row = t / packs, at = t % packs * N;
  if (row >= a.n) return;
  const int y = static_cast<int>(a.places[2 * row]), x = static_cast<int>(a.places[2 * row + 1]);
  const int height = static_cast<int>(a.sizes[2 * row]), width = static_cast<int>(a.sizes[2 * row + 1]);
  const int64_t stride = 3 * a.channels, first = row - row_in_frame(y, x, width, a.merge);
  Pack<T> weight[KK];
  float sum[N] = {};
#pragma unroll
  for (int p = 0; p < KK; ++p) weight[p] = load(a.weight + at * KK + p * N);
#pragma unroll
  for (int k = 0; k < KK; ++k) {
    const int down = y + k / K - K / 2, right = x + k % K - K / 2;
    if (down < 0 || down >= height || right < 0 || right >= width) continue;
    const T* there = a.rows + (first + row_in_frame(down, right, width, a.merge)) * stride + at;
    const Pack<T> gate = load(there), value = load(there + 2 * a.channels);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      sum[i] += wide(gate.x[i]) * wide(value.x[i]) * wide(weight[(i * KK + k) / N].x[(i * KK + k) % N]);
    }
  }
  Pack<T> made = load(a.rows + row * stride + a.channels + at);
#pragma unroll
  for (int i = 0; i < N; ++i) narrow(made.x[i], sum[i] * wide(made.x[i]));
  store(a.out + row * a.channels + at, made);
}

template <class T, class Stream>
void run_grid_conv(const GridArgs<T>& a, Stream stream) {
  const int64_t threads = a.n * (a.channels / Pack<T>::N);
  if (threads) HYDRA_LAUNCH((grid_conv<T, 3>), blocks_for(threads), THREADS, stream, a);
}

}  // namespace hydra
