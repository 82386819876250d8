// A layer of experts, for few rows. Rows of the same expert are multiplied together, so that each weight is read once.
#pragma once
#include <omp.h>

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "linear.h"

namespace hydra {

// The matrices and biases of all experts lie one after the other. Each gated MLP is down(silu(gate) * up), with the
// gate rows before the up rows. With a `limit`, gate and up rows are interleaved, and the MLP is down((up + 1) * gate *
// sigmoid(alpha * gate)), with gate and up clamped to the limit.
template <class T>
struct Experts {
  const T *gate_up, *gate_up_bias;  // [experts * 2 * inner, width], [experts * 2 * inner] or null
  const T *down, *down_bias;  // [experts * width, inner], [experts * width] or null
  int64_t width, inner;
  float limit, alpha;
};

// Slots are (row, expert) pairs sorted by expert. The slots of one expert form a group.
struct Group {
  int64_t expert, first, n;
};

inline std::vector<Group> group_slots(const int64_t* chosen, int64_t n, std::vector<int64_t>& slots) {
  slots.resize(n);
  std::iota(slots.begin(), slots.end(), 0);
  std::stable_sort(slots.begin(), slots.end(), [&](int64_t a, int64_t b) { return chosen[a] < chosen[b]; });
  std::vector<Group> groups;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t expert = chosen[slots[i]];
    if (groups.empty() || groups.back().expert != expert) groups.push_back({expert, i, 0});
    ++groups.back().n;
  }
  return groups;
}

// Computes columns [i0, i1) of the input of `down`, for `n` rows: wide [n, 2 * inner] → hidden [n, inner].
template <class T>
inline void gate(const Experts<T>& e, const T* wide, T* hidden, int64_t n, int64_t i0, int64_t i1) {
  for (int64_t m = 0; m < n; ++m) {
    const T* row = wide + m * 2 * e.inner;
    T* to = hidden + m * e.inner;
    int64_t i = i0;
    for (; e.limit == 0 && i + W <= i1; i += W) store(to + i, swish(load(row + i), 1.0f) * load(row + e.inner + i));
    for (; i < i1; ++i) {
      const bool turns = e.limit != 0;
      float g = to_float(row[turns ? 2 * i : i]), up = to_float(row[turns ? 2 * i + 1 : e.inner + i]);
      if (turns) g = std::min(g, e.limit), up = std::max(-e.limit, std::min(up, e.limit)) + 1.0f;
      from_float(up * g / (1.0f + std::exp(-g * (turns ? e.alpha : 1.0f))), to[i]);
    }
  }
}

template <class T>
using Laid = std::vector<typename Rows<T>::X>;

// out [rows, width] += the sum of the outputs of each row's `each` experts for x [rows, width], with weights [rows,
// each].
template <class T>
void run_experts(const Experts<T>& e, const T* x, const int64_t* chosen, const T* weights, int64_t rows, int64_t each,
                 T* out) {
  const int64_t n = rows * each, width = e.width, inner = e.inner;
  std::vector<int64_t> slots;
  const std::vector<Group> groups = group_slots(chosen, n, slots);
  Laid<T> given(n * width), laid(n * inner);
  std::vector<T> wide(n * 2 * inner), hidden(n * inner), made(n * width);
  std::vector<float> sums(rows * width);
#pragma omp parallel if (n * inner * width > 32768)
  {
    const int64_t threads = omp_get_num_threads(), me = omp_get_thread_num();
#pragma omp for schedule(static)
    for (int64_t i = 0; i < n; ++i) lay_row<T>(x + slots[i] / each * width, given.data() + i * width, width);
    const auto [i0, i1] = share(inner, me, threads, W);
    for (const Group& g : groups) {
      const T* bias = e.gate_up_bias ? e.gate_up_bias + g.expert * 2 * inner : nullptr;
      const LinearArgs<T> a{given.data() + g.first * width, e.gate_up + g.expert * 2 * inner * width, nullptr, bias,
                            wide.data() + g.first * 2 * inner, g.n, 2 * inner, width, 2 * inner, false};
      if (e.limit != 0)
        columns(a, 2 * i0, 2 * i1);
      else
        columns(a, i0, i1), columns(a, inner + i0, inner + i1);
      gate(e, a.out, hidden.data() + g.first * inner, g.n, i0, i1);
    }
#pragma omp barrier
#pragma omp for schedule(static)
    for (int64_t i = 0; i < n; ++i) lay_row<T>(hidden.data() + i * inner, laid.data() + i * inner, inner);
    const auto [c0, c1] = share(width, me, threads);
    for (const Group& g : groups) {
      const T* bias = e.down_bias ? e.down_bias + g.expert * width : nullptr;
      const LinearArgs<T> a{laid.data() + g.first * inner, e.down + g.expert * width * inner, nullptr, bias,
                            made.data() + g.first * width, g.n, width, inner, width, false};
      columns(a, c0, c1);
      for (int64_t m = 0; m < g.n; ++m) {
        const int64_t slot = slots[g.first + m];
        const float weight = to_float(weights[slot]);
        float* sum = sums.data() + slot / each * width;
        for (int64_t c = c0; c < c1; ++c) sum[c] += weight * to_float(a.out[m * width + c]);
      }
    }
    for (int64_t m = 0; m < rows; ++m)
      for (int64_t c = c0; c < c1; ++c) {
        T& o = out[m * width + c];
        from_float(to_float(o) + sums[m * width + c], o);
      }
  }
}

}  // namespace hydra
