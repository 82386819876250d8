// Activations, and gates: an activation of one half of a row times the other.
#pragma once
#include "numbers.cuh"

namespace hydra {

struct Silu {
  __device__ float operator()(float x) const { return x * sigmoid(x); }
};

struct GeluTanh {
  __device__ float operator()(float x) const {
    return 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
  }
};

// gate_up [rows, 2 * width], out [rows, width]; width is a multiple of a pack of `BYTES` bytes.
template <class T, class Act, int BYTES>
__global__ void act_and_mul(const T* gate_up, T* out, int64_t rows, int64_t width) {
  constexpr int N = Pack<T, BYTES>::N;
  const int64_t t = this_thread(), packs = width / N, row = t / packs, at = t % packs * N;
  if (row >= rows) return;
  const T* here = gate_up + row * 2 * width + at;
  const Pack<T, BYTES> gate = load<BYTES>(here), up = load<BYTES>(here + width);
  Pack<T, BYTES> made;
#pragma unroll
  for (int i = 0; i < N; ++i) narrow(made.x[i], Act{}(wide(gate.x[i])) * wide(up.x[i]));
  store(out + row * width + at, made);
}

// GPT-OSS's gate of n pairs (gate, up): `gate_up` [n, 2], `out` [n]; n is a multiple of a pack.
template <class T>
__global__ void clamped_swiglu(const T* gate_up, T* out, int64_t n, float limit, float alpha) {
  constexpr int N = Pack<T>::N;
  const int64_t at = this_thread() * N;
  if (at >= n) return;
  const Pack<T> pairs[2] = {load(gate_up + 2 * at), load(gate_up + 2 * at + N)};
  Pack<T> made;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float x = wide(pairs[2 * i / N].x[2 * i % N]), y = wide(pairs[2 * i / N].x[2 * i % N + 1]);
    const float gate = x > limit ? limit : x;  // NaN stays NaN
    const float up = y > limit ? limit : y < -limit ? -limit : y;
    narrow(made.x[i], (up + 1.0f) * gate * sigmoid(gate * alpha));
  }
  store(out + at, made);
}

// x * sigmoid(1.702 x) of n numbers in place; n is a multiple of a pack.
template <class T>
__global__ void quick_gelu(T* x, int64_t n) {
  const int64_t at = this_thread() * Pack<T>::N;
  if (at >= n) return;
  Pack<T> pack = load(x + at);
#pragma unroll
  for (T& each : pack.x) narrow(each, wide(each) * sigmoid(1.702f * wide(each)));
  store(x + at, pack);
}

template <class Act, int BYTES, class T, class Stream>
void run_act_and_mul_by(const T* gate_up, T* out, int64_t rows, int64_t width, Stream stream) {
  const int64_t threads = rows * (width / Pack<T, BYTES>::N);
  if (threads) HYDRA_LAUNCH((act_and_mul<T, Act, BYTES>), blocks_for(threads), THREADS, stream, gate_up, out, rows, width);
}

// Some widths, as 3,420 numbers of 16 bits, are multiples of 8 bytes only.
template <class Act, class T, class Stream>
void run_act_and_mul(const T* gate_up, T* out, int64_t rows, int64_t width, Stream stream) {
  if (width % Pack<T>::N == 0) {
    run_act_and_mul_by<Act, 16>(gate_up, out, rows, width, stream);
  } else {
    run_act_and_mul_by<Act, sizeof(T) < 4 ? 8 : 16>(gate_up, out, rows, width, stream);
  }
}

template <class T, class Stream>
void run_clamped_swiglu(const T* gate_up, T* out, int64_t n, float limit, float alpha, Stream stream) {
  const int64_t threads = n / Pack<T>::N;
  if (threads) HYDRA_LAUNCH(clamped_swiglu<T>, blocks_for(threads), THREADS, stream, gate_up, out, n, limit, alpha);
}

template <class T, class Stream>
void run_quick_gelu(T* x, int64_t n, Stream stream) {
  const int64_t threads = n / Pack<T>::N;
  if (threads) HYDRA_LAUNCH(quick_gelu<T>, blocks_for(threads), THREADS, stream, x, n);
}

}  // namespace hydra
