// Numbers of 16 and 32 bits, and 16 bytes of them at once.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define HYDRA_LAUNCH(kernel, blocks, threads, stream, ...) kernel<<<blocks, threads, 0, stream>>>(__VA_ARGS__)
#define HYDRA_LAUNCH_TOGETHER HYDRA_LAUNCH  // for kernels whose threads wait for each other
namespace hydra {
using bf16 = __nv_bfloat16;
using f16 = __half;
__device__ inline float wide(bf16 x) { return __bfloat162float(x); }
__device__ inline float wide(f16 x) { return __half2float(x); }
__device__ inline void narrow(bf16& to, float x) { to = __float2bfloat16_rn(x); }
__device__ inline void narrow(f16& to, float x) { to = __float2half_rn(x); }
}  // namespace hydra
#else
#include "shim.h"  // of tests/cuda: the same kernels by a C++ compiler
#endif

namespace hydra {
__device__ inline float wide(float x) { return x; }
__device__ inline void narrow(float& to, float x) { to = x; }

// As many numbers as one access of `BYTES` bytes brings.
template <class T, int BYTES = 16>
struct alignas(BYTES) Pack {
  static constexpr int N = BYTES / sizeof(T);
  T x[N];
};

template <int BYTES = 16, class T>
__device__ inline Pack<T, BYTES> load(const T* from) {
  return *reinterpret_cast<const Pack<T, BYTES>*>(from);
}

template <class T, int BYTES>
__device__ inline void store(T* to, const Pack<T, BYTES>& pack) {
  *reinterpret_cast<Pack<T, BYTES>*>(to) = pack;
}

// The same as one access of 16 bytes, also where the compiler would make several.
template <class T>
__device__ inline void store_whole(T* to, const Pack<T>& pack) {
#ifdef __CUDACC__
  uint4 raw;
  __builtin_memcpy(&raw, &pack, sizeof raw);
  __stwb(reinterpret_cast<uint4*>(to), raw);
#else
  store(to, pack);
#endif
}

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

constexpr int THREADS = 256;
inline unsigned blocks_for(int64_t threads) { return static_cast<unsigned>((threads + THREADS - 1) / THREADS); }
__device__ inline int64_t this_thread() { return int64_t(blockIdx.x) * THREADS + threadIdx.x; }
}  // namespace hydra
