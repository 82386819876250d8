// Runs one of our CUDA kernels on what it reads, and writes what became of it: counts and numbers as int64, then buffers,
// each with its size before it. Buffers are exactly as large as they say, for the sanitizers' sake.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "blocks.cuh"
#include "elementwise.cuh"
#include "grid.cuh"
#include "heads.cuh"
#include "norm.cuh"
#include "scan.cuh"

using namespace hydra;

static int64_t number() {
  int64_t n;
  if (fread(&n, 8, 1, stdin) != 1) exit(3);
  return n;
}

struct Buffer {
  char* bytes;
  int64_t size;
};
static std::vector<int64_t> n;
static std::vector<Buffer> buffers;

template <class T>
T* at(int i) {
  return reinterpret_cast<T*>(buffers[i].bytes);
}

template <class T, class W>
void heads() {  // qkv, cos, sin, store, slots, q_norm, k_norm, to: queries and keys; in place without norms
  const bool normed = buffers[5].size;
  T *qkv = at<T>(0), *kept = at<T>(3) + n[6] * n[4] * n[5];
  run_write_heads<16>(
      HeadArgs<T, W>{qkv, qkv + (n[3] + n[4]) * n[5], normed ? at<T>(7) : qkv, normed ? at<W>(5) : nullptr,
                     normed ? at<W>(6) : nullptr, at<float>(1), at<float>(2), at<T>(3), kept, at<int64_t>(4), n[0], n[1],
                     n[1], normed ? (n[3] + n[4]) * n[5] : n[1], n[2], int(n[3]), int(n[4]), int(n[5]), int(n[7]),
                     int(n[6]), 1e-5f},
      0);
}

template <class T>
void run(const std::string& what) {
  if (what == "heads") {
    n[8] ? heads<T, float>() : heads<T, T>();
  } else if (what == "norm_rope") {  // qkv, q_norm, k_norm, cos, sin, to
    HeadArgs<T, T> a{};
    a.from = at<T>(0), a.q_norm = at<T>(1), a.k_norm = at<T>(2), a.cos = at<float>(3), a.sin = at<float>(4);
    a.to = at<T>(5), a.rows = n[0], a.from_stride = n[1], a.to_stride = n[2], a.heads = int(n[3]);
    a.kv_heads = int(n[4]), a.dim = int(n[5]), a.half = int(n[6]), a.eps = 1e-5f;
    run_write_heads<16>(a, 0);
  } else if (what == "rope") {
    HeadArgs<T, T> a{};
    a.from = a.to = at<T>(0), a.cos = at<float>(1), a.sin = at<float>(2);
    a.rows = n[0], a.from_stride = a.to_stride = n[1], a.heads = int(n[2]), a.dim = int(n[3]), a.half = int(n[4]);
    run_rope(a, 0);
  } else if (what == "silu_and_mul") {
    run_act_and_mul<Silu>(at<const T>(0), at<T>(1), n[0], n[1], 0);
  } else if (what == "gelu_tanh_and_mul") {
    run_act_and_mul<GeluTanh>(at<const T>(0), at<T>(1), n[0], n[1], 0);
  } else if (what == "clamped_swiglu") {
    run_clamped_swiglu(at<const T>(0), at<T>(1), n[0] * n[1], 7.0f, 1.702f, 0);
  } else if (what == "quick_gelu") {
    run_quick_gelu(at<T>(0), n[0] * n[1], 0);
  } else if (what == "rms_norm_wide") {
    run_rms_norm_wide(at<const T>(0), at<const float>(1), at<T>(2), n[0], n[1], 1e-6f, 0);
  } else if (what == "grid") {
    run_grid_conv(GridArgs<T>{at<const T>(0), at<const T>(1), at<const float>(2), at<const float>(3), at<T>(4), n[0], n[1],
                              int(n[2])},
                  0);
  } else if (what == "conv") {  // x, weight, bias, tails, out, sources, targets
    const T* bias = buffers[2].size ? at<const T>(2) : nullptr;
    run_conv_step(ConvArgs<T>{at<const T>(0), at<const T>(1), bias, at<T>(3), at<T>(4), at<const int64_t>(5),
                              at<const int64_t>(6), n[0], n[1], n[2], n[3], n[5] != 0},
                  int(n[4]), 0);
  } else if (what == "delta") {  // rows: mixed; behind: gate, beta, step; norm, rates, biases, states, out, sources, targets
    const T* gate = at<const T>(1);
    const int64_t wide = n[2] * n[5];
    run_delta_step(DeltaArgs<T>{at<const T>(0), gate, gate + wide, gate + wide + n[2], at<const T>(2), at<const float>(3),
                                at<const float>(4), at<float>(5), at<T>(6), at<const int64_t>(7), at<const int64_t>(8),
                                n[0], wide + 2 * n[2], wide + 2 * n[2], wide + 2 * n[2], n[1], int(n[2]), int(n[3]),
                                int(n[4]), int(n[5]), 1e-6f},
                   0);
  } else {
    run_copy_blocks(at<void>(0), at<const void>(1), at<int64_t>(2), at<int64_t>(3), n[0], n[1], 0);
  }
}

int main(int, char** args) {
  const std::string what = args[1], type = args[2];
  n.resize(number());
  for (int64_t& each : n) each = number();
  buffers.resize(number());
  for (Buffer& b : buffers) {
    b.size = number();
    b.bytes = static_cast<char*>(malloc(b.size));
    if (fread(b.bytes, 1, b.size, stdin) != size_t(b.size)) return 3;
  }
  type == "float32" ? run<float>(what) : type == "bfloat16" ? run<bf16>(what) : run<f16>(what);
  for (const Buffer& b : buffers) {
    fwrite(b.bytes, 1, b.size, stdout);
    free(b.bytes);
  }
}
