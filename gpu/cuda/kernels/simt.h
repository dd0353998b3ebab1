// The few things of CUDA that the kernels need, for three compilers: clang without CUDA headers (how the checked-in PTX is
// made), nvcc, and g++, which runs the kernels on the CPU through the SIMT shim of the stub driver.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;

#if defined(KV_SIMT_SHIM) // g++: functions of ../testdata/stub/simt.cpp

#include <math.h>
#define KERNEL extern "C"
#define DEVICE static inline
#define SHARED static // one block runs at a time
#define TABLE static const
u32 simt_tid();
u32 simt_block(int axis);
u32 simt_grid(int axis);
u32 simt_threads();
void simt_barrier();
float simt_shfl_xor(float v, u32 lane_mask);
DEVICE u32 tid() { return simt_tid(); }
DEVICE u32 block_x() { return simt_block(0); }
DEVICE u32 block_y() { return simt_block(1); }
DEVICE u32 block_z() { return simt_block(2); }
DEVICE u32 grid_x() { return simt_grid(0); }
DEVICE u32 threads() { return simt_threads(); }
DEVICE void barrier() { simt_barrier(); }
DEVICE float shfl_xor(float v, u32 m) { return simt_shfl_xor(v, m); }
DEVICE float exp2_fast(float x) { return exp2f(x); }
DEVICE float half_to_float(u16 h) {
  u32 sign = (u32)(h & 0x8000) << 16, e = h >> 10 & 31, f = h & 1023, bits;
  if (e == 0) {
    float v = (float)f * (1.0f / (1 << 24));
    __builtin_memcpy(&bits, &v, 4);
  } else {
    bits = (e == 31 ? 0x7f800000u : (e + 112) << 23) | f << 13;
  }
  bits |= sign;
  float v;
  __builtin_memcpy(&v, &bits, 4);
  return v;
}
struct vec16 {
  u32 w[4];
};
DEVICE vec16 load16(const void *p) { return *(const vec16 *)p; }
DEVICE void store16(void *p, vec16 v) { *(vec16 *)p = v; }

#elif defined(__CUDACC__) // nvcc

#define KERNEL extern "C" __global__
#define DEVICE static __device__ __forceinline__
#define SHARED __shared__
#define TABLE static __device__ const
DEVICE u32 tid() { return threadIdx.x; }
DEVICE u32 block_x() { return blockIdx.x; }
DEVICE u32 block_y() { return blockIdx.y; }
DEVICE u32 block_z() { return blockIdx.z; }
DEVICE u32 grid_x() { return gridDim.x; }
DEVICE u32 threads() { return blockDim.x; }
DEVICE void barrier() { __syncthreads(); }
DEVICE float shfl_xor(float v, u32 m) { return __shfl_xor_sync(0xffffffffu, v, m); }
DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float half_to_float(u16 h) {
  float v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(h));
  return v;
}
struct vec16 {
  u32 w[4];
};
DEVICE vec16 load16(const void *p) {
  uint4 v = *(const uint4 *)p;
  return {{v.x, v.y, v.z, v.w}};
}
DEVICE void store16(void *p, vec16 v) { *(uint4 *)p = make_uint4(v.w[0], v.w[1], v.w[2], v.w[3]); }

#else // clang -x cuda -nocudainc

#define KERNEL extern "C" __attribute__((global))
#define DEVICE static inline __attribute__((device, always_inline))
#define SHARED static __attribute__((shared))
#define TABLE static __attribute__((device)) const
DEVICE u32 tid() { return __nvvm_read_ptx_sreg_tid_x(); }
DEVICE u32 block_x() { return __nvvm_read_ptx_sreg_ctaid_x(); }
DEVICE u32 block_y() { return __nvvm_read_ptx_sreg_ctaid_y(); }
DEVICE u32 block_z() { return __nvvm_read_ptx_sreg_ctaid_z(); }
DEVICE u32 grid_x() { return __nvvm_read_ptx_sreg_nctaid_x(); }
DEVICE u32 threads() { return __nvvm_read_ptx_sreg_ntid_x(); }
DEVICE void barrier() { __nvvm_bar_sync(0); }
DEVICE float shfl_xor(float v, u32 m) { return __nvvm_shfl_sync_bfly_f32(0xffffffffu, v, m, 31); }
DEVICE float exp2_fast(float x) { return __nvvm_ex2_approx_f(x); }
DEVICE float half_to_float(u16 h) {
  float v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(h));
  return v;
}
struct vec16 {
  u32 w[4];
};
// By inline PTX, since the compiler would split the load into those of its words. It may move it freely: nothing that a
// kernel loads this way does it write.
DEVICE vec16 load16(const void *p) {
  vec16 v;
  asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3]) : "l"(p));
  return v;
}
DEVICE void store16(void *p, vec16 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3]) : "memory");
}

#endif

DEVICE float as_float(u32 bits) {
  float v;
  __builtin_memcpy(&v, &bits, 4);
  return v;
}
