// The CUDA kernels behind hydrainfer.ops.cuda.kernels, on the stream that is torch's current one.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include "blocks.cuh"
#include "elementwise.cuh"
#include "grid.cuh"
#include "heads.cuh"
#include "norm.cuh"
#include "scan.cuh"

using tvm::ffi::Optional;
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

cudaStream_t stream_of(const TensorView& t) {
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(t.device().device_type, t.device().device_id));
}

void check() {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) TVM_FFI_THROW(RuntimeError) << "CUDA error: " << cudaGetErrorString(error);
}

bool is_float(const TensorView& t) { return t.dtype().code == kDLFloat && t.dtype().bits == 32; }

// qk [rows, heads, dim], rotated in place.
void rope_in_place(TensorView qk, TensorView cos, TensorView sin) {
  by_dtype(qk, [&](auto zero) {
    using T = decltype(zero);
    HeadArgs<T, T> a{};
    a.from = a.to = data<T>(qk), a.from_stride = a.to_stride = qk.stride(0), a.rows = qk.size(0);
    a.cos = data<const float>(cos), a.sin = data<const float>(sin);
    a.heads = static_cast<int>(qk.size(1)), a.dim = static_cast<int>(qk.size(2)), a.half = static_cast<int>(cos.size(1));
    run_rope(a, stream_of(qk));
  });
  check();
}

// qk [rows, heads + kv_heads, dim] to `to`, which may be the same tensor if there are no norms; fresh [rows, kv_heads,
// dim], cos and sin [rows, half]; keys and values of the cache [blocks, block_tokens, kv_heads, dim] with one stride from
// block to block. Norms have one dtype, that of qk or float32.
void write_heads_into(TensorView qk, TensorView fresh, TensorView to, Optional<TensorView> q_norm,
                      Optional<TensorView> k_norm,
                      TensorView cos, TensorView sin, TensorView keys, TensorView values, TensorView slots, double eps) {
  by_dtype(qk, [&](auto zero) {
    using T = decltype(zero);
    const auto run = [&](auto weight) {
      using W = decltype(weight);
      const int kv_heads = static_cast<int>(keys.size(2));
      const W *q_weight = nullptr, *k_weight = nullptr;
      if (q_norm.has_value()) q_weight = data<const W>(q_norm.value());
      if (k_norm.has_value()) k_weight = data<const W>(k_norm.value());
      run_write_heads<16>(
          HeadArgs<T, W>{data<const T>(qk),
                         data<const T>(fresh),
                         data<T>(to),
                         q_weight,
                         k_weight,
                         data<const float>(cos),
                         data<const float>(sin),
                         data<T>(keys),
                         data<T>(values),
                         data<const int64_t>(slots),
                         qk.size(0),
                         qk.stride(0),
                         fresh.stride(0),
                         to.stride(0),
                         keys.stride(0),
                         static_cast<int>(qk.size(1)) - kv_heads,
                         kv_heads,
                         static_cast<int>(qk.size(2)),
                         static_cast<int>(cos.size(1)),
                         static_cast<int>(keys.size(1)),
                         static_cast<float>(eps)},
          stream_of(qk));
    };
    const auto& norm = q_norm.has_value() ? q_norm : k_norm;
    if (norm.has_value() && is_float(norm.value())) {
      run(float{});
    } else {
      run(T{});
    }
  });
  check();
}

// qk [rows, heads + kv_heads, dim] to `to`, another tensor, by norms in its dtype.
void norm_rope_into(TensorView qk, TensorView to, TensorView q_norm, TensorView k_norm, TensorView cos, TensorView sin,
                    int64_t kv_heads, double eps) {
  by_dtype(qk, [&](auto zero) {
    using T = decltype(zero);
    HeadArgs<T, T> a{};
    a.from = data<const T>(qk), a.to = data<T>(to), a.from_stride = qk.stride(0), a.to_stride = to.stride(0);
    a.q_norm = data<const T>(q_norm), a.k_norm = data<const T>(k_norm), a.eps = static_cast<float>(eps);
    a.cos = data<const float>(cos), a.sin = data<const float>(sin), a.rows = qk.size(0);
    a.heads = static_cast<int>(qk.size(1) - kv_heads), a.kv_heads = static_cast<int>(kv_heads);
    a.dim = static_cast<int>(qk.size(2)), a.half = static_cast<int>(cos.size(1));
    run_write_heads<16>(a, stream_of(qk));
  });
  check();
}

template <class Act>
void act_and_mul_into(TensorView gate_up, TensorView out) {
  by_dtype(gate_up, [&](auto zero) {
    using T = decltype(zero);
    run_act_and_mul<Act>(data<const T>(gate_up), data<T>(out), out.size(0), out.size(1), stream_of(gate_up));
  });
  check();
}

void clamped_swiglu_into(TensorView gate_up, TensorView out, double limit, double alpha) {
  by_dtype(gate_up, [&](auto zero) {
    using T = decltype(zero);
    run_clamped_swiglu(data<const T>(gate_up), data<T>(out), out.size(0) * out.size(1), static_cast<float>(limit),
                       static_cast<float>(alpha), stream_of(gate_up));
  });
  check();
}

void quick_gelu_in_place(TensorView x) {
  by_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    run_quick_gelu(data<T>(x), x.size(0) * x.size(1), stream_of(x));
  });
  check();
}

// weight [width] float32.
void rms_norm_wide_into(TensorView x, TensorView weight, TensorView out, double eps) {
  by_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    run_rms_norm_wide(data<const T>(x), data<const float>(weight), data<T>(out), x.size(0), x.size(1),
                      static_cast<float>(eps), stream_of(x));
  });
  check();
}

// x [rows, channels], dense in a row; weight [channels, 3, 4 or 7]; tails [blocks, width - 1, channels], dense in a block.
void conv_step_into(TensorView x, TensorView weight, Optional<TensorView> bias, TensorView tails, TensorView sources,
                    TensorView targets, TensorView out, bool silu) {
  by_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    const T* added = nullptr;
    if (bias.has_value()) added = data<const T>(bias.value());
    run_conv_step(ConvArgs<T>{data<const T>(x), data<const T>(weight), added, data<T>(tails), data<T>(out),
                              data<const int64_t>(sources), data<const int64_t>(targets), x.size(0), x.size(1), x.stride(0),
                              tails.stride(0), silu},
                  static_cast<int>(weight.size(1)), stream_of(x));
  });
  check();
}

// mixed [rows, 2 * key_heads * key_dim + heads * dim]; gate [rows, heads * dim], beta, step [rows, heads], dense in a row;
// states [blocks, heads, key_dim, dim] float32, dense in a block; out [rows, heads * dim].
void delta_step_into(TensorView mixed, TensorView gate, TensorView beta, TensorView step, TensorView norm,
                     TensorView log_rate, TensorView step_bias, TensorView states, TensorView sources, TensorView targets,
                     TensorView out, double eps) {
  by_dtype(mixed, [&](auto zero) {
    using T = decltype(zero);
    const int heads = static_cast<int>(states.size(1)), key_dim = static_cast<int>(states.size(2)),
              dim = static_cast<int>(states.size(3));
    const int key_heads = static_cast<int>(mixed.size(1) - heads * dim) / 2 / key_dim;
    run_delta_step(DeltaArgs<T>{data<const T>(mixed), data<const T>(gate), data<const T>(beta), data<const T>(step),
                                data<const T>(norm), data<const float>(log_rate), data<const float>(step_bias),
                                data<float>(states), data<T>(out), data<const int64_t>(sources),
                                data<const int64_t>(targets), mixed.size(0), gate.stride(0), beta.stride(0), step.stride(0),
                                states.stride(0), heads, key_heads, key_dim, dim, static_cast<float>(eps)},
                   stream_of(mixed));
  });
  check();
}

// rows [n, 3 * channels], weight [channels, 1, 3, 3], places and sizes [n, 2] float32, out [n, channels]; all dense.
void grid_conv_into(TensorView rows, TensorView weight, TensorView places, TensorView sizes, TensorView out,
                    int64_t merge) {
  by_dtype(rows, [&](auto zero) {
    using T = decltype(zero);
    run_grid_conv(GridArgs<T>{data<const T>(rows), data<const T>(weight), data<const float>(places),
                              data<const float>(sizes), data<T>(out), out.size(0), out.size(1), static_cast<int>(merge)},
                  stream_of(rows));
  });
  check();
}

// to, from [blocks, bytes] of uint8; ids [n] int64.
void copy_blocks_into(TensorView to, TensorView from, TensorView to_ids, TensorView from_ids) {
  if (to.size(1) % 16) TVM_FFI_THROW(ValueError) << "a block of " << to.size(1) << " bytes is no multiple of 16";
  run_copy_blocks(data<void>(to), data<const void>(from), data<const int64_t>(to_ids), data<const int64_t>(from_ids),
                  to_ids.size(0), to.size(1), stream_of(to));
  check();
}

// As above, from memory that is mapped at an address: a peer's.
void copy_blocks_from_address(TensorView to, int64_t address, TensorView to_ids, TensorView from_ids) {
  if (to.size(1) % 16 || address % 16) TVM_FFI_THROW(ValueError) << "blocks must begin at multiples of 16 bytes";
  run_copy_blocks(data<void>(to), reinterpret_cast<const void*>(address), data<const int64_t>(to_ids),
                  data<const int64_t>(from_ids), to_ids.size(0), to.size(1), stream_of(to));
  check();
}

}  // namespace hydra

TVM_FFI_DLL_EXPORT_TYPED_FUNC(rope, hydra::rope_in_place);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(norm_rope, hydra::norm_rope_into);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(write_heads, hydra::write_heads_into);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(silu_and_mul, hydra::act_and_mul_into<hydra::Silu>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gelu_tanh_and_mul, hydra::act_and_mul_into<hydra::GeluTanh>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(clamped_swiglu, hydra::clamped_swiglu_into);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(quick_gelu, hydra::quick_gelu_in_place);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm_wide, hydra::rms_norm_wide_into);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(conv_step, hydra::conv_step_into);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(delta_step, hydra::delta_step_into);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(grid_conv, hydra::grid_conv_into);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copy_blocks, hydra::copy_blocks_into);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copy_blocks_from, hydra::copy_blocks_from_address);
