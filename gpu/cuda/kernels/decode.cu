// Paged decode attention, as gpu.Attention describes it. Compiled three times, for K and V in bf16 (KV_TYPE 0), fp16 (1)
// and fp32 (2).
//
// A block of 128 threads takes one part of one sequence for up to G query heads of one KV head. LANES neighbouring
// threads own a token: each loads N times 16 bytes of its K row, the query heads share what was loaded, shuffles complete
// the dot products, and the same threads weigh the V row. TOKENS tokens of each team are in flight. Every warp runs the
// same number of rounds: a token behind the end is read as the last one again and weighs nothing, since a shuffle that
// only part of a warp reaches is undefined.
//
// Scores are in units of log2. "No score yet" is a finite number: infinities and NaN belong to the data, and must come
// out as they went in.
#include "simt.h"

#ifndef KV_TYPE
#error "define KV_TYPE"
#endif

struct attention_args {
  const void *q;
  const u8 *pool;
  const i32 *table;   // [batch][max_pages]
  const i32 *seqlens; // [batch]
  float *part;        // [batch][q_heads][splits][value_dim + 2], unless splits is 1
  float *out;         // [batch][q_heads][value_dim]
  u64 page_stride, k_off, v_off, token_stride, head_stride;
  i32 max_pages, page_tokens, q_heads, kv_heads, splits, window, q_type;
  float scale_log2e;      // of the scores
  float cap_in, cap_log2; // soft cap: cap_log2 * tanh(score * cap_in); 0 means none
};

#define WARPS 4
#define NO_SCORE -1e30f

// elem is how many elements 16 bytes hold.
#if KV_TYPE == 2
#define ELEM 4
#define NAME(head, tail) head##fp32##tail
DEVICE void unpack(vec16 v, float *x) {
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = as_float(v.w[i]);
}
DEVICE void load2(const u8 *p, float *x) {
  u64 v = *(const u64 *)p;
  x[0] = as_float((u32)v), x[1] = as_float((u32)(v >> 32));
}
#else
#define ELEM 8
#if KV_TYPE == 0
#define NAME(head, tail) head##bf16##tail
DEVICE float low(u32 w) { return as_float(w << 16); }
DEVICE float high(u32 w) { return as_float(w & 0xffff0000u); }
#else
#define NAME(head, tail) head##fp16##tail
DEVICE float low(u32 w) { return half_to_float((u16)w); }
DEVICE float high(u32 w) { return half_to_float((u16)(w >> 16)); }
#endif
DEVICE void unpack(vec16 v, float *x) {
#pragma unroll
  for (int i = 0; i < 4; i++) x[2 * i] = low(v.w[i]), x[2 * i + 1] = high(v.w[i]);
}
DEVICE void load2(const u8 *p, float *x) {
  u32 v = *(const u32 *)p;
  x[0] = low(v), x[1] = high(v);
}
#endif
#define ELEM_BYTES (16 / ELEM)

DEVICE float load_q(const void *q, i32 type, u64 i) {
  if (type == 2) return ((const float *)q)[i];
  u16 h = ((const u16 *)q)[i];
  return type == 1 ? half_to_float(h) : as_float((u32)h << 16);
}

DEVICE float maximum(float a, float b) { return a > b ? a : b; } // a NaN in a is passed over: its weight will be one

// tanh_fast: away from zero by exponentials, near it by the polynomial of Cephes, where the difference has no digits.
DEVICE float tanh_fast(float x) {
  float a = x < 0 ? -x : x;
  float e = exp2_fast(-2.88539008f * a);
  float far = (1 - e) / (1 + e);
  float z = x * x;
  float p = (((-5.70498872745e-3f * z + 2.06390887954e-2f) * z - 5.37397155531e-2f) * z + 1.33314422036e-1f) * z - 3.33332819422e-1f;
  return a < 0.625f ? x + x * z * p : (x < 0 ? -far : far);
}

// decode is one block. DIM is elements of a K row that are also V (latent) or all of them; TAIL is 1 if 2 more elements
// per lane follow in K only.
template <int LANES, int N, int G, int TOKENS, int TAIL>
DEVICE void decode(const attention_args &a) {
  const int dim = LANES * N * ELEM, teams = WARPS * 32 / LANES, per = N * ELEM;
  const u32 team = tid() / LANES, lane = tid() % LANES;
  const u32 group = (u32)(a.q_heads / a.kv_heads), tiles = (group + G - 1) / G;
  const u32 kv_head = block_y() / tiles, first = block_y() % tiles * G;
  const u32 heads = group - first < G ? group - first : G; // of G
  const u32 seq = block_z(), split = block_x();
  const i32 len = a.seqlens[seq];
  const i32 begin = a.window > 0 && a.window < len ? len - a.window : 0;
  const i32 size = (len - begin + a.splits - 1) / a.splits;
  const i32 from = begin + (i32)split * size, to = from + size < len ? from + size : len;

  float q[G][per + 2 * TAIL], acc[G][per], m[G], l[G];
#pragma unroll
  for (int g = 0; g < G; g++) {
    u32 head = kv_head * group + first + (g < (int)heads ? g : 0);
    u64 row = ((u64)seq * a.q_heads + head) * (dim + 2 * TAIL * LANES);
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int i = 0; i < ELEM; i++) q[g][n * ELEM + i] = a.scale_log2e * load_q(a.q, a.q_type, row + (n * LANES + lane) * ELEM + i);
#pragma unroll
    for (int i = 0; i < 2 * TAIL; i++) q[g][per + i] = a.scale_log2e * load_q(a.q, a.q_type, row + dim + 2 * lane + i);
#pragma unroll
    for (int i = 0; i < per; i++) acc[g][i] = 0;
    m[g] = NO_SCORE;
    l[g] = 0;
  }

  for (i32 base = from; base < to; base += teams * TOKENS) {
    float v[TOKENS][per], s[TOKENS][G];
    const u8 *rows[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
      i32 token = base + t * teams + (i32)team;
      token = token < to ? token : to - 1;
      u32 page = (u32)token / (u32)a.page_tokens, in = (u32)token % (u32)a.page_tokens;
      rows[t] = a.pool + (u64)(u32)a.table[(u64)seq * a.max_pages + page] * a.page_stride + in * a.token_stride + kv_head * a.head_stride;
#pragma unroll
      for (int n = 0; n < N; n++) unpack(load16(rows[t] + a.k_off + (n * LANES + lane) * 16), &v[t][n * ELEM]);
    }
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
      float tail[2] = {0, 0};
      if (TAIL) load2(rows[t] + a.k_off + dim * ELEM_BYTES + 2 * ELEM_BYTES * lane, tail);
#pragma unroll
      for (int g = 0; g < G; g++) {
        float x = 0;
#pragma unroll
        for (int i = 0; i < per; i++) x += q[g][i] * v[t][i];
#pragma unroll
        for (int i = 0; i < 2 * TAIL; i++) x += q[g][per + i] * tail[i];
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2) x += shfl_xor(x, step);
        s[t][g] = x;
      }
    }
    if (!TAIL) { // latent rows are their own values
#pragma unroll
      for (int t = 0; t < TOKENS; t++)
#pragma unroll
        for (int n = 0; n < N; n++) unpack(load16(rows[t] + a.v_off + (n * LANES + lane) * 16), &v[t][n * ELEM]);
    }
#pragma unroll
    for (int g = 0; g < G; g++) {
      float top = m[g];
#pragma unroll
      for (int t = 0; t < TOKENS; t++) {
        if (a.cap_log2 != 0) s[t][g] = a.cap_log2 * tanh_fast(s[t][g] * a.cap_in);
        if (base + t * teams + (i32)team < to) top = maximum(s[t][g], top);
      }
      float corr = exp2_fast(m[g] - top);
      m[g] = top;
      l[g] *= corr;
#pragma unroll
      for (int i = 0; i < per; i++) acc[g][i] *= corr;
#pragma unroll
      for (int t = 0; t < TOKENS; t++) {
        float p = base + t * teams + (i32)team < to ? exp2_fast(s[t][g] - top) : 0;
        l[g] += p;
#pragma unroll
        for (int i = 0; i < per; i++) acc[g][i] += p * v[t][i];
      }
    }
  }

  // All teams on the largest maximum, then one after another into shared memory: a loop, since unrolled shuffles of every
  // sum were most of the code.
  SHARED float sum[G][dim], tops[teams][G], totals[teams][G];
#pragma unroll
  for (int g = 0; g < G; g++)
    if (lane == 0) tops[team][g] = m[g], totals[team][g] = l[g];
  barrier();
#pragma unroll
  for (int g = 0; g < G; g++) {
    float top = NO_SCORE;
    for (int i = 0; i < teams; i++) top = maximum(tops[i][g], top);
    float corr = exp2_fast(m[g] - top);
#pragma unroll
    for (int i = 0; i < per; i++) acc[g][i] *= corr;
  }
  for (u32 turn = 0; turn < teams; turn++) {
    if (team == turn) {
#pragma unroll
      for (int g = 0; g < G; g++)
#pragma unroll
        for (int i = 0; i < per; i++) {
          float *to = &sum[g][(i / ELEM * LANES + lane) * ELEM + i % ELEM];
          *to = turn == 0 ? acc[g][i] : *to + acc[g][i];
        }
    }
    barrier();
  }
  for (u32 g = 0; g < heads; g++) {
    float top = NO_SCORE, total = 0;
    for (int i = 0; i < teams; i++) top = maximum(tops[i][g], top);
    for (int i = 0; i < teams; i++) total += totals[i][g] * exp2_fast(tops[i][g] - top);
    u64 row = (u64)seq * a.q_heads + kv_head * group + first + g;
    for (u32 d = tid(); d < dim; d += threads()) {
      if (a.splits == 1) {
        a.out[row * dim + d] = len > 0 ? sum[g][d] / total : 0;
      } else {
        float *part = a.part + (row * a.splits + split) * (dim + 2);
        part[d] = sum[g][d];
        if (d == 0) part[dim] = top, part[dim + 1] = total;
      }
    }
  }
}

#define DECODE(dim, lanes, n, g, tokens) \
  KERNEL void NAME(kv_decode_, _d##dim##_g##g)(attention_args a) { decode<lanes, n, g, tokens, 0>(a); }

// Kernels: lanes * n * 16 bytes are one row. As many tokens are in flight as fit 255 registers without a spill.
#if KV_TYPE == 2
DECODE(64, 16, 1, 1, 4)
DECODE(64, 16, 1, 4, 4)
DECODE(64, 16, 1, 8, 2)
DECODE(96, 8, 3, 1, 2)
DECODE(96, 8, 3, 4, 2)
DECODE(96, 8, 3, 8, 1)
DECODE(128, 32, 1, 1, 4)
DECODE(128, 32, 1, 4, 4)
DECODE(128, 32, 1, 8, 2)
DECODE(256, 32, 2, 1, 2)
DECODE(256, 32, 2, 4, 2)
DECODE(256, 32, 2, 8, 2)
#else
DECODE(64, 8, 1, 1, 4)
DECODE(64, 8, 1, 4, 4)
DECODE(64, 8, 1, 8, 2)
DECODE(96, 4, 3, 1, 2)
DECODE(96, 4, 3, 4, 1)
DECODE(128, 16, 1, 1, 4)
DECODE(128, 16, 1, 4, 4)
DECODE(128, 16, 1, 8, 2)
DECODE(256, 32, 1, 1, 4)
DECODE(256, 32, 1, 4, 4)
DECODE(256, 32, 1, 8, 2)
#endif

// Latent rows of 512 + 64.
KERNEL void NAME(kv_decode_, _latent_g4)(attention_args a) { decode<32, 512 / 32 / ELEM, 4, 1, 1>(a); }

// The combination of parts is the same for every type.
#if KV_TYPE == 0
// kv_decode_combine adds up the parts of each query head. Grid (query heads, batch), any number of threads.
KERNEL void kv_decode_combine(const float *part, float *out, const i32 *seqlens, i32 splits, i32 q_heads, i32 dim) {
  u64 row = (u64)block_y() * q_heads + block_x();
  const float *p = part + row * splits * (dim + 2);
  float top = NO_SCORE, total = 0;
  for (i32 i = 0; i < splits; i++) top = maximum(p[i * (dim + 2) + dim], top);
  for (i32 i = 0; i < splits; i++) total += p[i * (dim + 2) + dim + 1] * exp2_fast(p[i * (dim + 2) + dim] - top);
  for (i32 d = (i32)tid(); d < dim; d += (i32)threads()) {
    float x = 0;
    for (i32 i = 0; i < splits; i++) x += p[i * (dim + 2) + d] * exp2_fast(p[i * (dim + 2) + dim] - top);
    out[row * dim + d] = seqlens[block_y()] > 0 ? x / total : 0;
  }
}
#endif
