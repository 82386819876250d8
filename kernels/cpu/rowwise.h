// Operations on single rows, used by the single operators (ops.cpp) and by whole layers (layer.h). Never inlined, so
// that both give the same bits.
#pragma once
#include "simd.h"

namespace hydra {

// RMS norm: x [width], normalised, times weight [width] → out, which may be x.
template <class T>
[[gnu::noinline]] void rms_norm_row(const T* x, const T* weight, T* out, int64_t width, float eps) {
  vec squares{};
  int64_t d = 0;
  for (; d + W <= width; d += W) squares += load(x + d) * load(x + d);
  float total = sum(squares);
  for (; d < width; ++d) total += to_float(x[d]) * to_float(x[d]);
  const float scale = 1.0f / std::sqrt(total / width + eps);
  for (d = 0; d + W <= width; d += W) store(out + d, load(x + d) * scale * load(weight + d));
  for (; d < width; ++d) from_float(to_float(x[d]) * scale * to_float(weight[d]), out[d]);
}

// RoPE: rotates the first 2 * half numbers of a head in place, given cos and sin [half].
template <class T>
[[gnu::noinline]] void rope_head(T* head, const float* cos, const float* sin, int64_t half) {
  T *a = head, *b = head + half;
  int64_t d = 0;
  for (; d + W <= half; d += W) {
    const vec x = load(a + d), y = load(b + d), c = load(cos + d), s = load(sin + d);
    store(a + d, x * c - y * s);
    store(b + d, y * c + x * s);
  }
  for (; d < half; ++d) {
    const float x = to_float(a[d]), y = to_float(b[d]);
    from_float(x * cos[d] - y * sin[d], a[d]);
    from_float(y * cos[d] + x * sin[d], b[d]);
  }
}

// silu(gate) * up → out, [width] each. The last width % W numbers are rounded differently from whole vectors.
template <class T>
[[gnu::noinline]] void silu_and_mul_row(const T* gate, const T* up, T* out, int64_t width) {
  int64_t d = 0;
  for (; d + W <= width; d += W) {
    store(out + d, swish(load(gate + d), 1.0f) * load(up + d));
  }
  for (; d < width; ++d) {
    const float x = to_float(gate[d]);
    from_float(x / (1.0f + std::exp(-x)) * to_float(up[d]), out[d]);
  }
}

}  // namespace hydra
