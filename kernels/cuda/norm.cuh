// The norm of rows with weights in float32, as those that are stored as a difference from one.
#pragma once
#include "numbers.cuh"

namespace hydra {

// x / rms(x) * weight, rounded once. x, out [rows, width]; width is a multiple of a pack. A block has one row.
template <class T>
__global__ void rms_norm_wide(const T* x, const float* weight, T* out, int64_t width, float eps) {
  constexpr int N = Pack<T>::N, PARTS = 16;
  __shared__ float of_threads[THREADS], of_parts[PARTS];
  const T* here = x + int64_t(blockIdx.x) * width;
  float sum = 0;
  for (int64_t at = int64_t(threadIdx.x) * N; at < width; at += THREADS * N) {
    const Pack<T> pack = load(here + at);
#pragma unroll
    for (int i = 0; i < N; ++i) sum += wide(pack.x[i]) * wide(pack.x[i]);
  }
  of_threads[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x < PARTS) {
    float part = 0;
    for (int i = threadIdx.x; i < THREADS; i += PARTS) part += of_threads[i];
    of_parts[threadIdx.x] = part;
  }
  __syncthreads();
  float total = 0;
  for (int i = 0; i < PARTS; ++i) total += of_parts[i];
  const float scale = rsqrtf(total / width + eps);
  for (int64_t at = int64_t(threadIdx.x) * N; at < width; at += THREADS * N) {
    Pack<T> pack = load(here + at);
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const Pack<float> w = load(weight + at + i);
#pragma unroll
      for (int j = 0; j < 4; ++j) narrow(pack.x[i + j], wide(pack.x[i + j]) * scale * w.x[j]);
    }
    store(out + int64_t(blockIdx.x) * width + at, pack);
  }
}

template <class T, class Stream>
void run_rms_norm_wide(const T* x, const float* weight, T* out, int64_t rows, int64_t width, float eps, Stream stream) {
  if (rows) {
    HYDRA_LAUNCH_TOGETHER(rms_norm_wide<T>, static_cast<unsigned>(rows), THREADS, stream, x, weight, out, width, eps);
  }
}

}  // namespace hydra
