// The CPU kernels behind hydrainfer.ops.cpu.native. Threads come from the OpenMP pool that torch uses, so
// torch.set_num_threads in the calling thread applies here, too.
#include <omp.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <vector>

#include "attention.h"
#include "layer.h"
#include "linear.h"
#include "moe.h"
#include "product.h"
#include "rowwise.h"
#include "scan.h"
#include "simd.h"

using tvm::ffi::Array;
using tvm::ffi::Function;
using tvm::ffi::Optional;
using tvm::ffi::Tensor;
using tvm::ffi::TensorView;

namespace hydra {

template <class F>
void by_dtype(const TensorView& t, F&& f) {
  const DLDataType d = t.dtype();
  if (d.code == kDLFloat && d.bits == 32) return f(float{});
  if (d.code == kDLBfloat && d.bits == 16) return f(bf16{});
  if (d.code == kDLFloat && d.bits == 16) return f(f16{});
  TVM_FFI_THROW(TypeError) << "kernels take float32, bfloat16 or float16";
}

template <class T>
T* data(const TensorView& t) {
  return reinterpret_cast<T*>(static_cast<char*>(t.data_ptr()) + t.byte_offset());
}

// Divides the columns among threads. `args(x)` makes the arguments for x in the layout of Rows<T>.
template <class T, class O, class Args>
void multiply_rows(const O* x, int64_t M, int64_t N, int64_t K, Args&& args) {
  std::vector<typename Rows<T>::X> laid;
  const LinearArgs<T, O> a = args(lay_rows<T>(x, M, K, laid));
#pragma omp parallel if (N * K > 32768)
  {
    const auto [n0, n1] = share(N, omp_get_thread_num(), omp_get_num_threads());
    if (n0 < n1) columns(a, n0, n1);
  }
}

// x [M, K], w [N, K], bias [N] or empty, out [M, N]; all contiguous.
void linear(TensorView x, TensorView w, TensorView bias, TensorView out, bool accumulate) {
  by_dtype(w, [&](auto zero) {
    using T = decltype(zero);
    const int64_t M = x.size(0), K = x.size(1), N = w.size(0);
    multiply_rows<T>(data<T>(x), M, N, K, [&](const auto* rows) {
      const T* b = bias.size(0) ? data<T>(bias) : nullptr;
      return LinearArgs<T>{rows, data<T>(w), nullptr, b, data<T>(out), M, N, K, N, accumulate};
    });
  });
}

// As `linear` with w [N, K] int8 and scales [N] float32.
void linear_int8(TensorView x, TensorView w, TensorView scales, TensorView bias, TensorView out, bool accumulate) {
  by_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    const int64_t M = x.size(0), K = x.size(1), N = w.size(0);
    multiply_rows<int8_t>(data<T>(x), M, N, K, [&](const float* rows) {
      const T* b = bias.size(0) ? data<T>(bias) : nullptr;
      return LinearArgs<int8_t, T>{rows, data<int8_t>(w), data<float>(scales), b, data<T>(out), M, N, K, N, accumulate};
    });
  });
}

// As `linear` for many rows x [M, K] of any stride. scales [N] float32 where w is int8, else empty.
void linear_many(TensorView x, TensorView w, TensorView scales, TensorView bias, TensorView out, bool accumulate) {
  by_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    const auto multiply = [&](auto* weights) {
      using Q = std::remove_pointer_t<decltype(weights)>;
      multiply_many(ProductArgs<T, Q>{data<T>(x), weights, scales.size(0) ? data<float>(scales) : nullptr,
                                      bias.size(0) ? data<T>(bias) : nullptr, data<T>(out), x.size(0), w.size(0),
                                      x.size(1), x.stride(0), accumulate});
    };
    w.dtype().code == kDLInt ? multiply(data<int8_t>(w)) : multiply(data<T>(w));
  });
}

// w [N, K] int8 times scales [N] float32 → out [N, K]; all contiguous.
void widen_int8(TensorView w, TensorView scales, TensorView out) {
  by_dtype(out, [&](auto zero) {
    using T = decltype(zero);
    const int64_t N = w.size(0), K = w.size(1);
#pragma omp parallel for if (N * K > 32768)
    for (int64_t n = 0; n < N; ++n) {
      const int8_t* from = data<int8_t>(w) + n * K;
      T* to = data<T>(out) + n * K;
      const float scale = data<float>(scales)[n];
      int64_t k = 0;
      for (; k + W <= K; k += W) store(to + k, load(from + k) * scale);
      for (; k < K; ++k) from_float(to_float(from[k]) * scale, to[k]);
    }
  });
}

// A task: rows row … end - 1 of a KV head of request (or segment) i.
struct Part {
  int64_t i, head, row, end;
};

// Cuts `rows` query rows into tasks of whole panels, those with the most keys first; several tasks per thread if there
// are enough. `total`: the rows of all requests or segments.
template <class Each>
void cut(int64_t rows, int64_t total, Each&& each) {
  const int64_t panel = PANEL * W, shares = total / (6 * omp_get_max_threads() * panel);
  const int64_t most = std::max<int64_t>(1, std::min<int64_t>(4, shares));
  for (int64_t end = rows, row; end > 0; end = row) {
    row = (end - 1) / (most * panel) * (most * panel);
    each(row, end);
  }
}

template <class T>
Pages<T> pages(const TensorView& t) {
  return {data<T>(t), t.stride(0), t.stride(1), t.stride(2), t.size(3)};
}

// Attention of decodes (the first `n_decodes` requests) and chunks in one call. q [rows, heads, dim] with any row
// stride; keys and values of one layer [blocks, block_tokens, kv_heads, dim]; tables [requests, blocks]; lengths
// [requests]; starts [requests + 1]: their first rows; out contiguous. `ends` [rows] and `sinks` [heads] (either may be
// empty), `window` and `cap`: see Queries.
void attention(TensorView q, TensorView keys, TensorView values, TensorView tables, TensorView lengths, TensorView starts,
               TensorView ends, TensorView sinks, int64_t n_decodes, int64_t window, TensorView out,
               double scale, double cap) {
  by_dtype(q, [&](auto zero) {
    using T = decltype(zero);
    const PagedArgs<T> a{data<T>(q), pages<T>(keys), pages<T>(values), data<T>(out), data<int32_t>(tables),
                         data<int32_t>(lengths), ends.size(0) ? data<int32_t>(ends) : nullptr,
                         sinks.size(0) ? data<float>(sinks) : nullptr, q.stride(0), tables.stride(0), q.size(1),
                         keys.size(2), keys.size(1), window, float(scale), float(cap)};
    const int32_t* start = data<int32_t>(starts);
    const int64_t group = a.heads / a.kv_heads, n = lengths.size(0);
    std::vector<Part> chunks;
    for (int64_t i = n_decodes; i < n; ++i)
      for (int64_t head = 0; head < a.kv_heads; ++head)
        cut((start[i + 1] - start[i]) * group, (start[n] - n_decodes) * a.heads,
            [&](int64_t row, int64_t end) { chunks.push_back({i, head, row, end}); });
    const int64_t parts = decode_parts(n_decodes, a.kv_heads, omp_get_max_threads());
    const int64_t n_chunks = chunks.size();
#pragma omp parallel
    {
      std::vector<float> scratch;
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < n_chunks + n_decodes * parts; ++i) {
        if (i < n_chunks) {
          const Part& p = chunks[i];
          attend_pages(a, p.i, p.head, start[p.i], start[p.i + 1] - start[p.i], p.row, p.end, scratch);
        } else {
          const int64_t part = (i - n_chunks) % parts;
          decode_one(a, (i - n_chunks) / parts, part * a.kv_heads / parts, (part + 1) * a.kv_heads / parts, scratch);
        }
      }
    }
  });
}

// q, k, v [rows, heads, dim] with any row stride; starts [segments + 1]: their first rows; out contiguous.
void attention_segments(TensorView q, TensorView k, TensorView v, TensorView starts, TensorView out, double scale) {
  by_dtype(q, [&](auto zero) {
    using T = decltype(zero);
    const int64_t heads = q.size(1), dim = q.size(2), n = starts.size(0) - 1;
    const int32_t* start = data<int32_t>(starts);
    std::vector<Part> parts;
    for (int64_t i = 0; i < n; ++i)
      for (int64_t head = 0; head < heads; ++head)
        cut(start[i + 1] - start[i], start[n] * heads,
            [&](int64_t row, int64_t end) { parts.push_back({i, head, row, end}); });
#pragma omp parallel
    {
      std::vector<float> scratch;
#pragma omp for schedule(dynamic, 1)
      for (size_t i = 0; i < parts.size(); ++i) {
        const Part& p = parts[i];
        const int64_t first = start[p.i], rows = start[p.i + 1] - first;
        const T *keys = data<T>(k) + first * k.stride(0) + p.head * k.stride(1),
                *values = data<T>(v) + first * v.stride(0) + p.head * v.stride(1);
        const Queries<T> a{data<T>(q) + first * q.stride(0) + p.head * q.stride(1),
                           data<T>(out) + (first * heads + p.head) * dim,
                           q.stride(0), 0, heads * dim, 1, dim, dim, rows, rows, 0, float(scale)};
        attend(a, p.row, p.end, [&](int64_t t, int64_t n, const T** ks, const T** vs) {
          for (int64_t j = 0; j < n; ++j) ks[j] = keys + (t + j) * k.stride(0), vs[j] = values + (t + j) * v.stride(0);
        }, scratch);
      }
    }
  });
}

// Writes keys and values [rows, kv_heads, dim], with any row stride, to the cache at slots [rows].
void write_kv(TensorView keys, TensorView values, TensorView key_cache, TensorView value_cache, TensorView slots) {
  by_dtype(keys, [&](auto zero) {
    using T = decltype(zero);
    const int64_t bt = key_cache.size(1), n = keys.size(0), *slot = data<int64_t>(slots);
    const int64_t width = keys.size(1) * keys.size(2), v_width = values.size(1) * values.size(2);
    const Pages<T> k = pages<T>(key_cache), v = pages<T>(value_cache);
#pragma omp parallel for if (n * width > 65536)
    for (int64_t i = 0; i < n; ++i) {
      const int64_t block = slot[i] / bt, offset = slot[i] % bt;
      std::memcpy(const_cast<T*>(k.at(block, offset, 0)), data<T>(keys) + i * keys.stride(0), width * sizeof(T));
      std::memcpy(const_cast<T*>(v.at(block, offset, 0)), data<T>(values) + i * values.stride(0), v_width * sizeof(T));
    }
  });
}

// Rotates qk [rows, heads, dim], with any row stride, in place. cos, sin [rows, dim / 2] float32; with fewer columns
// the rest of each head stays as it is.
void rope(TensorView qk, TensorView cos, TensorView sin) {
  by_dtype(qk, [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = qk.size(0), heads = qk.size(1), half = cos.size(1);
#pragma omp parallel for if (n * heads * half > 32768)
    for (int64_t i = 0; i < n; ++i) {
      const float *c = data<float>(cos) + i * half, *s = data<float>(sin) + i * half;
      for (int64_t h = 0; h < heads; ++h) rope_head(data<T>(qk) + i * qk.stride(0) + h * qk.stride(1), c, s, half);
    }
  });
}

// x, out [rows, width] contiguous; weight [width].
void rms_norm(TensorView x, TensorView weight, TensorView out, double eps) {
  by_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = x.size(0), width = x.size(1);
#pragma omp parallel for if (n * width > 65536)
    for (int64_t i = 0; i < n; ++i)
      rms_norm_row(data<T>(x) + i * width, data<T>(weight), data<T>(out) + i * width, width, float(eps));
  });
}

// gate_up [rows, 2 * width] contiguous → out [rows, width].
void silu_and_mul(TensorView gate_up, TensorView out) {
  by_dtype(out, [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = out.size(0), width = out.size(1);
#pragma omp parallel for if (n * width > 32768)
    for (int64_t i = 0; i < n; ++i) {
      const T* gate = data<T>(gate_up) + 2 * i * width;
      silu_and_mul_row(gate, gate + width, data<T>(out) + i * width, width);
    }
  });
}

// x contiguous, any shape: x * sigmoid(1.702 x) in place.
void quick_gelu(TensorView x) {
  by_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    T* p = data<T>(x);
    int64_t n = 1;
    for (int i = 0; i < x.ndim(); ++i) n *= x.size(i);
#pragma omp parallel for if (n > 32768)
    for (int64_t i = 0; i < n / W; ++i) store(p + i * W, swish(load(p + i * W), 1.702f));
    for (int64_t i = n / W * W; i < n; ++i) {
      const float v = to_float(p[i]);
      from_float(v / (1.0f + std::exp(v * -1.702f)), p[i]);
    }
  });
}

// A step of the gated delta rule for one row each of several requests, with any row stride: qkv [rows, channels], gate
// [rows, heads * dim], beta, step [rows, heads]. conv [channels, width], norm [dim]; rate, bias [heads] float32; tails
// [blocks, width - 1, channels] and states [blocks, heads, keys, dim] float32, blocks with any stride; sources, targets
// int64; out [rows, heads * dim].
void gated_delta(TensorView qkv, TensorView gate, TensorView beta, TensorView step, TensorView conv, TensorView norm,
                 TensorView rate, TensorView bias, TensorView tails, TensorView states, TensorView sources,
                 TensorView targets, TensorView out, double eps) {
  by_dtype(qkv, [&](auto zero) {
    using T = decltype(zero);
    const int64_t rows = qkv.size(0), channels = conv.size(0), heads = states.size(1), keys = states.size(2);
    const int64_t dim = states.size(3), key_heads = (channels - heads * dim) / (2 * keys), part = 256;
    const int64_t parts = (channels + part - 1) / part;
    const DeltaLayer<T> a{data<T>(conv), data<T>(norm), data<float>(rate), data<float>(bias), data<T>(tails),
                          data<float>(states), tails.stride(0), states.stride(0), conv.size(1), channels, key_heads,
                          keys, heads, dim, float(eps)};
    const int64_t *source = data<int64_t>(sources), *target = data<int64_t>(targets);
    std::vector<float> mixed(rows * channels);
#pragma omp parallel if (rows * heads * keys * dim > 32768)
    {
      std::vector<float> work(2 * keys + dim);
#pragma omp for
      for (int64_t i = 0; i < rows * parts; ++i) {
        const int64_t row = i / parts, first = i % parts * part;
        const T* from = source[row] < 0 ? nullptr : a.tails + source[row] * a.tail_stride;
        convolve(a, data<T>(qkv) + row * qkv.stride(0), from, a.tails + target[row] * a.tail_stride, first,
                 std::min(channels, first + part), mixed.data() + row * channels);
      }
#pragma omp for
      for (int64_t i = 0; i < rows * heads; ++i) {
        const int64_t row = i / heads, head = i % heads;
        delta_head(a, head, mixed.data() + row * channels, data<T>(beta)[row * beta.stride(0) + head],
                   data<T>(step)[row * step.stride(0) + head], data<T>(gate) + row * gate.stride(0) + head * dim,
                   source[row], target[row], work.data(), data<T>(out) + i * dim);
      }
    }
  });
}

// x, out [rows, width], chosen int64 and weights [rows, each], all contiguous; the rest: see Experts. Adds to out.
void experts(TensorView x, TensorView chosen, TensorView weights, TensorView gate_up, TensorView down,
             TensorView gate_up_bias, TensorView down_bias, TensorView out, double limit, double alpha) {
  by_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    const Experts<T> e{data<T>(gate_up), gate_up_bias.size(0) ? data<T>(gate_up_bias) : nullptr,
                       data<T>(down), down_bias.size(0) ? data<T>(down_bias) : nullptr,
                       x.size(1), down.size(1), float(limit), float(alpha)};
    run_experts(e, data<T>(x), data<int64_t>(chosen), data<T>(weights), x.size(0), chosen.size(1), data<T>(out));
  });
}

using Tensors = Array<Optional<Tensor>>;

// The tensors of a layer in the order of hydrainfer.ops.cpu.native.PlainLayer.
template <class T, class Q>
DecoderLayer<T, Q> layer_of(const Tensors& tensors) {
  const auto at = [&](int64_t i, auto zero) -> decltype(zero)* {
    const Optional<Tensor> kept = tensors[i];
    if (!kept) return nullptr;
    const Tensor tensor = *kept;
    return data<decltype(zero)>(tensor);
  };
  const auto matrix = [&](int64_t i) {
    const Tensor weight = *tensors[i];
    return Matrix<T, Q>{at(i, Q{}), at(i + 1, float{}), at(i + 2, T{}), weight.size(0), weight.size(1)};
  };
  return {at(0, T{}), at(1, T{}), at(2, T{}), at(3, T{}), at(4, float{}), matrix(5), matrix(8), matrix(11), matrix(14)};
}

template <class T, class Q>
Function decoder_of(const Array<Tensors>& kept, int64_t heads, double eps, double scale) {
  std::vector<DecoderLayer<T, Q>> layers;
  for (const Tensors& tensors : kept) layers.push_back(layer_of<T, Q>(tensors));
  return Function::FromTyped([kept, layers, heads, eps, scale](TensorView x, TensorView cos, TensorView sin,
                                                               const Array<Tensor>& cache, TensorView tables, TensorView lengths, TensorView slots, int64_t window, bool shares) {
    std::vector<std::pair<Pages<T>, Pages<T>>> caches;
    for (size_t i = 0; i < cache.size(); i += 2) {
      const Tensor keys = cache[i], values = cache[i + 1];
      caches.push_back({pages<T>(keys), pages<T>(values)});
    }
    Decodes<T> d{data<T>(x), data<float>(cos), data<float>(sin), data<int64_t>(slots), x.size(0), cos.size(1), float(eps), shares};
    d.paged.tables = data<int32_t>(tables), d.paged.table_stride = tables.stride(0);
    d.paged.lengths = data<int32_t>(lengths), d.paged.window = window, d.paged.scale = float(scale);
    const Tensor keys = cache[0];
    d.paged.heads = heads, d.paged.block_tokens = keys.size(1), d.paged.kv_heads = keys.size(2);
    decode_layers(layers, caches, d);
  });
}

// Makes a function that runs rows through consecutive layers whose matrices have the same shapes. Its arguments: x
// [rows, hidden], contiguous, overwritten, and `shares`, see Decodes; cos, sin [rows, dim / 2] as for `rope`; keys and
// values of each layer in turn, tables [rows, blocks], lengths [rows], window as for `attention`, slots [rows] as for
// `write_kv`.
Function decoder(Array<Tensors> layers, int64_t heads, double eps, double scale) {
  Function made;
  const Tensor norm = *layers[0][0], qkv = *layers[0][5];
  by_dtype(norm, [&](auto zero) {
    using T = decltype(zero);
    const bool narrow = qkv.dtype().code == kDLInt;
    made = narrow ? decoder_of<T, int8_t>(layers, heads, eps, scale) : decoder_of<T, T>(layers, heads, eps, scale);
  });
  return made;
}

}  // namespace hydra

TVM_FFI_DLL_EXPORT_TYPED_FUNC(linear, hydra::linear);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(linear_int8, hydra::linear_int8);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(linear_many, hydra::linear_many);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(widen_int8, hydra::widen_int8);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attention, hydra::attention);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attention_segments, hydra::attention_segments);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(write_kv, hydra::write_kv);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rope, hydra::rope);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm, hydra::rms_norm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(silu_and_mul, hydra::silu_and_mul);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(quick_gelu, hydra::quick_gelu);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gated_delta, hydra::gated_delta);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(experts, hydra::experts);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(decoder, hydra::decoder);
