// The CUDA kernels behind hydrainfer.ops.cuda, on the stream that is torch's current one.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include "blocks.cuh"
#include "elementwise.cuh"
#include "rope.cuh"

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

// qk [rows, heads + kv_heads, dim], fresh [rows, kv_heads, dim], cos and sin [rows, dim / 2], keys and values of the cache
// [blocks, block_tokens, kv_heads, dim] with one stride from block to block.
void rope_write_kv(TensorView qk, TensorView fresh, TensorView cos, TensorView sin, TensorView keys, TensorView values,
                   TensorView slots) {
  by_dtype(qk, [&](auto zero) {
    using T = decltype(zero);
    const int kv_heads = static_cast<int>(keys.size(2));
    run_rope_write(
        RopeArgs<T>{data<T>(qk), data<T>(fresh), data<const float>(cos), data<const float>(sin), data<T>(keys),
                    data<T>(values), data<const int64_t>(slots), qk.size(0), qk.stride(0), fresh.stride(0), keys.stride(0),
                    static_cast<int>(qk.size(1)) - kv_heads, kv_heads, static_cast<int>(qk.size(2)),
                    static_cast<int>(keys.size(1))},
        stream_of(qk));
  });
  check();
}

void silu_and_mul_into(TensorView gate_up, TensorView out) {
  by_dtype(gate_up, [&](auto zero) {
    using T = decltype(zero);
    run_silu_and_mul(data<const T>(gate_up), data<T>(out), out.size(0), out.size(1), stream_of(gate_up));
  });
  check();
}

// to, from [blocks, bytes] of uint8; ids [n] int64.
void copy_blocks_into(TensorView to, TensorView from, TensorView to_ids, TensorView from_ids) {
  run_copy_blocks(data<void>(to), data<const void>(from), data<const int64_t>(to_ids), data<const int64_t>(from_ids),
                  to_ids.size(0), to.size(1), stream_of(to));
  check();
}

}  // namespace hydra

TVM_FFI_DLL_EXPORT_TYPED_FUNC(rope_write_kv, hydra::rope_write_kv);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(silu_and_mul, hydra::silu_and_mul_into);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copy_blocks, hydra::copy_blocks_into);
