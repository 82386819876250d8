// kernels/cpu/layer.h against double arithmetic: two layers, whose arrays lie on the heap in their exact sizes. Built by
// test_instruction_sets.py for each instruction set.
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "layer.h"

using namespace hydra;

inline void from_float(float x, int8_t& out) { out = int8_t(std::lround(x * 127)); }

template <class T>
struct Numbers {
  std::unique_ptr<T[]> at;
  explicit Numbers(int64_t n, float size = 1, float plus = 0) : at(new T[n]) {
    using hydra::from_float, ::from_float;
    for (int64_t i = 0; i < n; ++i) from_float(plus + size * float(std::rand() % 2001 - 1000) / 1000, at[i]);
  }
};

using Row = std::vector<double>;

template <class T>
Row row_of(const T* p, int64_t n) {
  Row row(n);
  for (int64_t i = 0; i < n; ++i) row[i] = to_float(p[i]);
  return row;
}

template <class T>
Row norm(const double* x, const T* weight, int64_t n) {
  double total = 0;
  for (int64_t i = 0; i < n; ++i) total += x[i] * x[i];
  Row row(n);
  for (int64_t i = 0; i < n; ++i) row[i] = x[i] / std::sqrt(total / n + 1e-5) * to_float(weight[i]);
  return row;
}

template <class T, class Q>
Row times(const Matrix<T, Q>& m, const Row& x) {
  Row row(m.N);
  for (int64_t n = 0; n < m.N; ++n) {
    for (int64_t k = 0; k < m.K; ++k) row[n] += to_float(m.w[n * m.K + k]) * x[k] * (m.scales ? m.scales[n] : 1.0f);
    if (m.bias) row[n] += to_float(m.bias[n]);
  }
  return row;
}

template <class T, class Q>
struct Case {
  int64_t rows, hidden, inner, heads, kv_heads, dim, v_dim, window;
  bool special;  // with biases, norms of heads, sinks; and half of a head is turned
  static constexpr int64_t block_tokens = 4, context = 9, blocks = 3;

  struct Owned {
    Numbers<Q> w;
    Numbers<float> scales;
    Numbers<T> bias;
    Matrix<T, Q> matrix;
    Owned(int64_t N, int64_t K, bool biased)
        : w(N * K, sizeof(Q) == 1 ? 1 : 1 / std::sqrt(float(K))), scales(N, 1e-3f, 1 / (127 * std::sqrt(float(K)))),
          bias(N, 0.1f), matrix{w.at.get(), sizeof(Q) == 1 ? scales.at.get() : nullptr, biased ? bias.at.get() : nullptr,
                                N, K} {}
  };

  // Row r after this layer; the cache has the keys and values of the tokens before it.
  Row after(const DecoderLayer<T, Q>& l, const Decodes<T>& d, Row x, int64_t r, const Pages<T>& keys,
            const Pages<T>& values) const {
    Row qkv = times(l.qkv, norm(x.data(), l.input_norm, hidden)), mixed(heads * v_dim);
    for (int64_t h = 0; h < heads + kv_heads; ++h) {
      double* head = qkv.data() + h * dim;
      if (const T* weight = h < heads ? l.q_norm : l.k_norm) {
        const Row normed = norm(head, weight, dim);
        std::copy(normed.begin(), normed.end(), head);
      }
      for (int64_t i = 0; i < d.half; ++i) {
        const double a = head[i], b = head[d.half + i], c = d.cos[r * d.half + i], s = d.sin[r * d.half + i];
        head[i] = a * c - b * s, head[d.half + i] = b * c + a * s;
      }
    }
    const int64_t first = window ? std::max<int64_t>(0, context + 1 - window) : 0;
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t kv = h / (heads / kv_heads);
      double total = l.sinks ? std::exp(double(l.sinks[h])) : 0;
      Row sum(v_dim);
      for (int64_t t = first; t <= context; ++t) {
        const int64_t block = r * blocks + t / block_tokens, offset = t % block_tokens;
        double score = 0;
        for (int64_t i = 0; i < dim; ++i) {
          const double key = t == context ? qkv[(heads + kv) * dim + i] : to_float(keys.at(block, offset, kv)[i]);
          score += qkv[h * dim + i] * key;
        }
        const double weight = std::exp(score * d.paged.scale);
        total += weight;
        for (int64_t i = 0; i < v_dim; ++i) {
          const double own = qkv[(heads + kv_heads) * dim + kv * v_dim + i];
          sum[i] += weight * (t == context ? own : to_float(values.at(block, offset, kv)[i]));
        }
      }
      for (int64_t i = 0; i < v_dim; ++i) mixed[h * v_dim + i] = sum[i] / total;
    }
    const Row added = times(l.out, mixed);
    for (int64_t i = 0; i < hidden; ++i) x[i] += added[i];
    const Row wide = times(l.gate_up, norm(x.data(), l.mlp_norm, hidden));
    Row gated(inner);
    for (int64_t i = 0; i < inner; ++i) gated[i] = wide[i] / (1 + std::exp(-wide[i])) * wide[inner + i];
    const Row more = times(l.down, gated);
    for (int64_t i = 0; i < hidden; ++i) x[i] += more[i];
    return x;
  }

  bool close(const char* name, double tolerance) const {
    const int64_t half = special ? dim / 4 : dim / 2, block = block_tokens * kv_heads * (dim + v_dim);
    Numbers<T> x(rows * hidden), norms(2 * hidden, 0.1f, 1), head_norms(2 * dim, 0.1f, 1), cache(2 * rows * blocks * block);
    Numbers<float> sinks(heads), cos(rows * half), sin(rows * half);
    const Owned qkv((heads + kv_heads) * dim + kv_heads * v_dim, hidden, special), out(hidden, heads * v_dim, special),
        gate_up(2 * inner, hidden, special), down(hidden, inner, special);
    const T* of_heads = head_norms.at.get();
    const DecoderLayer<T, Q> layer{norms.at.get(), norms.at.get() + hidden, special ? of_heads : nullptr,
                                   special ? of_heads + dim : nullptr, special ? sinks.at.get() : nullptr,
                                   qkv.matrix, out.matrix, gate_up.matrix, down.matrix};
    std::vector<int32_t> tables(rows * blocks), lengths(rows, context + 1);
    std::vector<int64_t> slots(rows);
    for (int64_t i = 0; i < rows * blocks; ++i) tables[i] = int32_t(i);
    for (int64_t r = 0; r < rows; ++r) slots[r] = r * blocks * block_tokens + context;
    std::vector<std::pair<Pages<T>, Pages<T>>> caches;
    for (int64_t i = 0; i < 2; ++i) {
      const T* at = cache.at.get() + i * rows * blocks * block;
      caches.push_back({{at, block, kv_heads * dim, dim, dim},
                        {at + block_tokens * kv_heads * dim, block, kv_heads * v_dim, v_dim, v_dim}});
    }
    Decodes<T> d{x.at.get(), cos.at.get(), sin.at.get(), slots.data(), rows, half, 1e-5f, {}};
    d.paged.tables = tables.data(), d.paged.table_stride = blocks, d.paged.lengths = lengths.data();
    d.paged.heads = heads, d.paged.kv_heads = kv_heads, d.paged.block_tokens = block_tokens;
    d.paged.window = window, d.paged.scale = 1 / std::sqrt(float(dim));
    std::vector<Row> want;
    for (int64_t r = 0; r < rows; ++r) {
      want.push_back(row_of(d.x + r * hidden, hidden));
      for (const auto& [keys, values] : caches) want[r] = after(layer, d, want[r], r, keys, values);
    }
    decode_layers<T, Q>({layer, layer}, caches, d);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = 0; i < hidden; ++i) {
        const double got = to_float(d.x[r * hidden + i]);
        if (!(std::abs(got - want[r][i]) <= tolerance * (1 + std::abs(want[r][i])))) {
          std::printf("%s rows=%ld hidden=%ld dim=%ld [%ld, %ld]: %g, not %g\n", name, long(rows), long(hidden), long(dim),
                      long(r), long(i), got, want[r][i]);
          return false;
        }
      }
    return true;
  }
};

template <class T, class Q = T>
bool close(const char* name, double tolerance) {
  for (int64_t rows : {1, 2, 5, 9})
    for (bool special : {false, true})
      if (!Case<T, Q>{rows, 40, 50, 4, 1, 12, 12, 0, special}.close(name, tolerance) ||
          !Case<T, Q>{rows, 136, 150, 6, 2, 16, 16, 5, special}.close(name, tolerance) ||
          !Case<T, Q>{rows, 67, 300, 3, 3, 20, 8, 0, special}.close(name, tolerance))
        return false;
  return true;
}

int main() {
  return close<float>("float32", 1e-5) && close<bf16>("bfloat16", 5e-2) && close<f16>("float16", 5e-3) &&
                 close<float, int8_t>("int8, float32", 1e-5) && close<bf16, int8_t>("int8, bfloat16", 5e-2)
             ? 0
             : 1;
}
