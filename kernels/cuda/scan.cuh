// One token of recurrent layers: a step of the short convolution, and one of the gated delta rule with what follows it.
// Row r continues from the state in block sources[r] (-1: from none) and leaves its own in block targets[r] (-1: nowhere).
#pragma once
#include "numbers.cuh"

namespace hydra {

// `x` and `out` [rows, channels]; `weight` [channels, W], the current row's last; `bias` [channels] or null; `tails` +
// block * tail_stride: [W - 1, channels].
template <class T>
struct ConvArgs {
  const T *x, *weight, *bias;
  T *tails, *out;
  const int64_t *sources, *targets;
  int64_t rows, channels, x_stride, tail_stride;
  bool silu;
};

// A thread has one pack of channels. What it reads of a wide convolution needs more registers.
template <class T, int W>
__global__ void __launch_bounds__(THREADS, W > 4 ? 2 : 4) conv_step(ConvArgs<T> a) {
  constexpr int N = Pack<T>::N;
  const int64_t t = this_thread(), packs = a.channels / N, row = t / packs, at = t % packs * N;
  if (row >= a.rows) return;
  const int64_t source = a.sources[row], target = a.targets[row];
  Pack<T> seen[W], made;
  float sum[N];
#pragma unroll
  for (int j = 0; j < W; ++j) {
    if (j == W - 1) {
      seen[j] = load(a.x + row * a.x_stride + at);
    } else {
      seen[j] = load(a.tails + (source < 0 ? 0 : source) * a.tail_stride + j * a.channels + at);
      if (source < 0) seen[j] = Pack<T>{};
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) sum[i] = a.bias ? wide(a.bias[at + i]) : 0.0f;
#pragma unroll
  for (int p = 0; p < W; ++p) {  // N channels have W packs of weights
    const Pack<T> weight = load(a.weight + at * W + p * N);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const int i = (p * N + n) / W, j = (p * N + n) % W;
      sum[i] += wide(seen[j].x[i]) * wide(weight.x[n]);
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) narrow(made.x[i], a.silu ? sum[i] * sigmoid(sum[i]) : sum[i]);
  store(a.out + row * a.channels + at, made);
  if (target < 0) return;
#pragma unroll
  for (int j = 0; j + 1 < W; ++j) {
    store_whole(a.tails + target * a.tail_stride + j * a.channels + at, seen[j + 1]);
  }
}

template <class T, class Stream>
void run_conv_step(const ConvArgs<T>& a, int width, Stream stream) {
  const int64_t threads = a.rows * (a.channels / Pack<T>::N);
  if (!threads) return;
  if (width == 3) HYDRA_LAUNCH((conv_step<T, 3>), blocks_for(threads), THREADS, stream, a);
  if (width == 4) HYDRA_LAUNCH((conv_step<T, 4>), blocks_for(threads), THREADS, stream, a);
  if (width == 7) HYDRA_LAUNCH((conv_step<T, 7>), blocks_for(threads), THREADS, stream, a);
}

constexpr int KEYS_EACH = 16, COLUMNS_EACH = 4, MOST_GROUPS = 8, MOST_COLUMNS = 128;  // of the delta rule

// `mixed` [rows, 2 * key_heads * key_dim + heads * dim]: queries, keys, values; `gate` [rows, heads * dim], `beta` and
// `step` [rows, heads]; `log_rate`, `step_bias` [heads]; `norm` [dim]; `states` + block * state_stride: [heads, key_dim,
// dim]; `out` [rows, heads * dim].
template <class T>
struct DeltaArgs {
  const T *mixed, *gate, *beta, *step, *norm;
  const float *log_rate, *step_bias;
  float* states;
  T* out;
  const int64_t *sources, *targets;
  int64_t rows, gate_stride, beta_stride, step_stride, state_stride;
  int heads, key_heads, key_dim, dim;
  float eps;
};

// A block has one head of one row; a thread has COLUMNS_EACH columns of KEYS_EACH rows of its matrix S, which so is read
// and written once. With k and q of unit length, u = beta (v - exp(decay) k S):
//   S <- exp(decay) S + k u,   out = q S = exp(decay) q S + (q k) u
template <class T>
__global__ void delta_step(DeltaArgs<T> a) {
  constexpr int N = Pack<T>::N, C = COLUMNS_EACH;
  __shared__ float of_k[MOST_GROUPS][MOST_COLUMNS], of_q[MOST_GROUPS][MOST_COLUMNS], dots[MOST_GROUPS][3];
  __shared__ float squares[MOST_COLUMNS / C];
  const int across = a.dim / C, groups = a.key_dim / KEYS_EACH;
  const int group = threadIdx.x / across, place = threadIdx.x % across, column = place * C;
  const int64_t row = blockIdx.x / a.heads, source = a.sources[row], target = a.targets[row];
  const int head = blockIdx.x % a.heads, key_head = head / (a.heads / a.key_heads), keys = a.key_heads * a.key_dim;
  const T* here = a.mixed + row * (2 * keys + a.heads * a.dim);
  const T *q = here + key_head * a.key_dim + group * KEYS_EACH, *k = q + keys;
  const int64_t corner = (int64_t(head) * a.key_dim + group * KEYS_EACH) * a.dim + column;

  Pack<float> state[KEYS_EACH];
  float kk = 0, qq = 0, qk = 0, k_state[C] = {}, q_state[C] = {};
#pragma unroll
  for (int i = 0; i < KEYS_EACH; ++i) {
    state[i] = source < 0 ? Pack<float>{} : load(a.states + source * a.state_stride + corner + i * a.dim);
  }
#pragma unroll
  for (int i = 0; i < KEYS_EACH; i += N) {
    const Pack<T> of_keys = load(k + i), of_queries = load(q + i);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float x = wide(of_keys.x[n]), y = wide(of_queries.x[n]);
      kk += x * x, qq += y * y, qk += x * y;
#pragma unroll
      for (int c = 0; c < C; ++c) k_state[c] += x * state[i + n].x[c], q_state[c] += y * state[i + n].x[c];
    }
  }
#pragma unroll
  for (int c = 0; c < C; ++c) of_k[group][column + c] = k_state[c], of_q[group][column + c] = q_state[c];
  if (place == 0) dots[group][0] = kk, dots[group][1] = qq, dots[group][2] = qk;
  __syncthreads();

  kk = qq = qk = 0;
#pragma unroll
  for (int c = 0; c < C; ++c) k_state[c] = q_state[c] = 0;
  for (int g = 0; g < groups; ++g) {
    kk += dots[g][0], qq += dots[g][1], qk += dots[g][2];
#pragma unroll
    for (int c = 0; c < C; ++c) k_state[c] += of_k[g][column + c], q_state[c] += of_q[g][column + c];
  }
  constexpr float UNIT_EPS = 1e-6f;
  const float k_unit = rsqrtf(kk + UNIT_EPS), q_unit = rsqrtf(qq + UNIT_EPS) * rsqrtf(float(a.key_dim));
  const float raw = wide(a.step[row * a.step_stride + head]) + a.step_bias[head];
  const float fall = expf(-expf(a.log_rate[head]) * (raw > 20.0f ? raw : log1pf(expf(raw))));
  const float beta = sigmoid(wide(a.beta[row * a.beta_stride + head]));
  const Pack<T, C * sizeof(T)> v = load<C * sizeof(T)>(here + 2 * keys + head * a.dim + column);
  float update[C], made[C], sum = 0;
#pragma unroll
  for (int c = 0; c < C; ++c) {
    update[c] = beta * (wide(v.x[c]) - fall * k_unit * k_state[c]);
    made[c] = q_unit * (fall * q_state[c] + k_unit * qk * update[c]);
    sum += made[c] * made[c];
  }
  if (target >= 0) {
#pragma unroll
    for (int i = 0; i < KEYS_EACH; i += N) {
      const Pack<T> of_keys = load(k + i);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float x = k_unit * wide(of_keys.x[n]);
#pragma unroll
        for (int c = 0; c < C; ++c) state[i + n].x[c] = fall * state[i + n].x[c] + x * update[c];
        store(a.states + target * a.state_stride + corner + (i + n) * a.dim, state[i + n]);
      }
    }
  }
  if (group == 0) squares[place] = sum;
  __syncthreads();

  if (group != 0) return;
  sum = 0;
  for (int i = 0; i < across; ++i) sum += squares[i];
  const float scale = rsqrtf(sum / a.dim + a.eps);
  const int64_t at = int64_t(head) * a.dim + column;
  const Pack<T, C * sizeof(T)> gate = load<C * sizeof(T)>(a.gate + row * a.gate_stride + at),
                               norm = load<C * sizeof(T)>(a.norm + column);
  Pack<T, C * sizeof(T)> gated;
#pragma unroll
  for (int c = 0; c < C; ++c) {
    const float z = wide(gate.x[c]);
    narrow(gated.x[c], made[c] * scale * wide(norm.x[c]) * z * sigmoid(z));
  }
  store(a.out + row * a.heads * a.dim + at, gated);
}

template <class T, class Stream>
void run_delta_step(const DeltaArgs<T>& a, Stream stream) {
  const int threads = a.dim / COLUMNS_EACH * (a.key_dim / KEYS_EACH);
  if (a.rows) HYDRA_LAUNCH_TOGETHER(delta_step<T>, static_cast<unsigned>(a.rows * a.heads), threads, stream, a);
}

}  // namespace hydra
