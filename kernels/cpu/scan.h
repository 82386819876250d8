// One step of the gated delta rule for one head: the state is read once from memory, and written once.
#pragma once
#include <algorithm>
#include <cstdint>

#include "simd.h"

namespace hydra {

// from, to [keys, dim], `from` null for zeros, may be `to`; q, k [keys]; v, out [dim]; known, asked [dim]: to work in.
//
//   known = fall * k S        u = beta (v - known)
//   S'    = fall * S + k u    out = q S' = fall * q S + (q . k) u
inline void delta_step(
    const float* from, float* to, const float* q, const float* k, const float* v, float fall, float beta, int64_t keys,
    int64_t dim, float* known, float* asked, float* out) {
  std::fill(known, known + dim, 0.0f);
  std::fill(asked, asked + dim, 0.0f);
  float both = 0.0f;
  for (int64_t i = 0; i < keys; ++i) both += q[i] * k[i];
  for (int64_t i = 0; from && i < keys; ++i) {
    const float* row = from + i * dim;
    const float ki = k[i], qi = q[i];
    int64_t d = 0;
    for (; d + W <= dim; d += W) {
      const vec s = load(row + d);
      store(known + d, load(known + d) + s * ki);
      store(asked + d, load(asked + d) + s * qi);
    }
    for (; d < dim; ++d) {
      known[d] += row[d] * ki;
      asked[d] += row[d] * qi;
    }
  }
  for (int64_t d = 0; d < dim; ++d) {
    known[d] = beta * (v[d] - fall * known[d]);  // the update, from here on
    out[d] = fall * asked[d] + both * known[d];
  }
  for (int64_t i = 0; i < keys; ++i) {
    const float* row = from ? from + i * dim : nullptr;
    const float ki = k[i];
    float* next = to + i * dim;
    int64_t d = 0;
    for (; d + W <= dim; d += W) store(next + d, (row ? load(row + d) * fall : vec{}) + load(known + d) * ki);
    for (; d < dim; ++d) next[d] = (row ? row[d] * fall : 0.0f) + known[d] * ki;
  }
}

}  // namespace hydra
