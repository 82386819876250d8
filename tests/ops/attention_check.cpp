// kernels/cpu/prefill.h and the decodes of attention.h against double arithmetic, over a paged cache whose blocks and
// tables lie on the heap in their exact sizes. Built by test_instruction_sets.py for each instruction set.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>

#include "attention.h"

using namespace hydra;

template <class T>
struct Case {
  int64_t tokens, context, group, dim, v_dim, block_tokens, window;
  bool spans, sinks;  // the second half of the tokens see each other; heads have sinks
  float cap;  // of scores, or 0
  static constexpr int64_t kv_heads = 2;

  bool close(const char* name, double tolerance) const {
    const int64_t L = tokens + context, heads = kv_heads * group, blocks = (L + block_tokens - 1) / block_tokens;
    const int64_t block = block_tokens * kv_heads * (dim + v_dim);
    std::unique_ptr<T[]> q(new T[tokens * heads * dim]), cache(new T[blocks * block]), out(new T[tokens * heads * v_dim]);
    std::unique_ptr<int32_t[]> table(new int32_t[blocks]), ends(new int32_t[tokens]);
    std::unique_ptr<float[]> sink(new float[heads]);
    const auto fill = [](T* p, int64_t n) {
      for (int64_t i = 0; i < n; ++i) from_float(float(std::rand() % 2001 - 1000) / 500, p[i]);
    };
    fill(q.get(), tokens * heads * dim), fill(cache.get(), blocks * block);
    for (int64_t b = 0; b < blocks; ++b) table[b] = int32_t(blocks - 1 - b);
    for (int64_t i = 0; i < tokens; ++i) ends[i] = int32_t(i >= tokens / 2 ? L - 1 : context + i);
    for (int64_t h = 0; h < heads; ++h) sink[h] = float(h) - 1;
    const int32_t length = int32_t(L);
    const float scale = 1 / std::sqrt(float(dim));
    const Pages<T> keys{cache.get(), block, kv_heads * dim, dim, dim};
    const Pages<T> values{cache.get() + block_tokens * kv_heads * dim, block, kv_heads * v_dim, v_dim, v_dim};
    const PagedArgs<T> a{q.get(), keys, values, out.get(), table.get(), &length, spans ? ends.get() : nullptr,
                         sinks ? sink.get() : nullptr, heads * dim, blocks, heads, kv_heads, block_tokens, window, scale,
                         cap};
    std::vector<float> scratch;
    if (tokens == 1) decode_one(a, 0, 0, kv_heads, scratch);
    const int64_t rows = tokens * group, half = rows / 2;
    for (int64_t head = 0; tokens > 1 && head < kv_heads; ++head) {
      attend_pages(a, 0, head, 0, tokens, half, rows, scratch);
      attend_pages(a, 0, head, 0, tokens, 0, half, scratch);
    }
    const auto at = [&](int64_t t, int64_t head, bool value) {
      return (value ? values : keys).at(table[t / block_tokens], t % block_tokens, head);
    };
    std::vector<double> p(L);
    for (int64_t i = 0; i < tokens; ++i)
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t from = window ? std::max<int64_t>(0, context + i + 1 - window) : 0;
        const int64_t seen = spans ? ends[i] + 1 : context + i + 1;
        const T* query = q.get() + (i * heads + h) * dim;
        double total = sinks ? std::exp(double(sink[h])) : 0;
        for (int64_t t = from; t < seen; ++t) {
          double s = 0;
          for (int64_t d = 0; d < dim; ++d) s += double(to_float(query[d])) * to_float(at(t, h / group, false)[d]);
          total += p[t] = std::exp(cap ? cap * std::tanh(s * scale / cap) : s * scale);
        }
        for (int64_t d = 0; d < v_dim; ++d) {
          double want = 0;
          for (int64_t t = from; t < seen; ++t) want += p[t] / total * to_float(at(t, h / group, true)[d]);
          const double got = to_float(out[(i * heads + h) * v_dim + d]);
          if (!(std::abs(got - want) <= tolerance)) {
            std::printf("%s tokens=%ld context=%ld group=%ld dim=%ld block=%ld window=%ld [%ld, %ld, %ld]: %g, not %g\n",
                        name,
                        long(tokens), long(context), long(group), long(dim), long(block_tokens), long(window), long(i), long(h),
                        long(d), got, want);
            return false;
          }
        }
      }
    return true;
  }
};

template <class T>
bool close(const char* name, double tolerance) {
  for (int64_t dim : {6, 16, 20, 64, 72, 80, 128})
    for (int64_t tokens : {1, 2, 17, 50})
      for (int64_t context : {0, 15, 95, 96, 200})
        for (int64_t window : {int64_t(0), 1 + dim / 2})
          if (const int64_t group = 1 + context % 3, v_dim = dim % 16 || context != 95 ? dim : dim / 2;
              !Case<T>{tokens, context, group, dim, v_dim, dim % 16 ? 1 : 16, window, context == 15, context > 95,
                       context == 15 || context == 200 ? 2.5f : 0.0f}.close(
                  name, tolerance))
            return false;
  return true;
}

int main() {
  return close<float>("float32", 1e-5) && close<bf16>("bfloat16", 2e-2) && close<f16>("float16", 2e-3) ? 0 : 1;
}
