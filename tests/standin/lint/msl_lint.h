// MSL's types and functions as declarations for clang, with address spaces that the compiler really tells apart.
// Syntax only: nothing here has a body that runs. See tests/standin/test_lint.py.
#pragma once
#define DS4_LINT 1

#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef unsigned long size_t;
typedef signed char int8_t;
typedef uchar uint8_t;
typedef short int16_t;
typedef ushort uint16_t;
typedef int int32_t;
typedef uint uint32_t;
typedef long int64_t;
typedef ulong uint64_t;
typedef _Float16 half;

#define DS4_LINT_VECTORS(T)                                \
  typedef T T##2 __attribute__((ext_vector_type(2)));      \
  typedef T T##3 __attribute__((ext_vector_type(3)));      \
  typedef T T##4 __attribute__((ext_vector_type(4)));      \
  template <class V> T##2 lint_##T##2(V);                  \
  template <class V> T##3 lint_##T##3(V);                  \
  template <class V> T##4 lint_##T##4(V);                  \
  T##2 lint_##T##2(T, T);                                  \
  T##3 lint_##T##3(T, T, T);                               \
  T##4 lint_##T##4(T, T, T, T);                            \
  T##4 lint_##T##4(T##2, T##2);
DS4_LINT_VECTORS(float)
DS4_LINT_VECTORS(half)
DS4_LINT_VECTORS(int)
DS4_LINT_VECTORS(uint)
DS4_LINT_VECTORS(short)
DS4_LINT_VECTORS(ushort)
DS4_LINT_VECTORS(char)
DS4_LINT_VECTORS(uchar)
// A macro with arguments leaves the bare name alone: float4 v = float4(a, b, c, d);
#define float2(...) lint_float2(__VA_ARGS__)
#define float3(...) lint_float3(__VA_ARGS__)
#define float4(...) lint_float4(__VA_ARGS__)
#define half2(...) lint_half2(__VA_ARGS__)
#define half4(...) lint_half4(__VA_ARGS__)
#define int2(...) lint_int2(__VA_ARGS__)
#define int3(...) lint_int3(__VA_ARGS__)
#define int4(...) lint_int4(__VA_ARGS__)
#define uint2(...) lint_uint2(__VA_ARGS__)
#define uint3(...) lint_uint3(__VA_ARGS__)
#define uint4(...) lint_uint4(__VA_ARGS__)
#define short2(...) lint_short2(__VA_ARGS__)
#define short4(...) lint_short4(__VA_ARGS__)
#define ushort2(...) lint_ushort2(__VA_ARGS__)
#define ushort4(...) lint_ushort4(__VA_ARGS__)
#define char2(...) lint_char2(__VA_ARGS__)
#define char4(...) lint_char4(__VA_ARGS__)
#define uchar2(...) lint_uchar2(__VA_ARGS__)
#define uchar4(...) lint_uchar4(__VA_ARGS__)
struct packed_float3 {
  float x, y, z;
};

template <class To, class From> constexpr To as_type(From x) { return __builtin_bit_cast(To, x); }
float fma(float, float, float);
float sqrt(float);
float fabs(float);
float abs(float);
int abs(int);
float floor(float);
float ceil(float);
float trunc(float);
float rint(float);
bool isnan(float);
bool isinf(float);
template <class T> T min(T, T);
template <class T> T max(T, T);
template <class T> T clamp(T, T, T);
void min(float, float) = delete;  // the sign of zero and NaN are open in Metal
void max(float, float) = delete;
void clamp(float, float, float) = delete;
template <class T> T select(T, T, bool);
uint popcount(uint);
uint clz(uint);
uint ctz(uint);
uint mulhi(uint, uint);

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
mem_flags operator|(mem_flags, mem_flags);
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
template <class T> T simd_shuffle(T, ushort);
template <class T> T simd_shuffle_xor(T, ushort);
template <class T> T simd_shuffle_up(T, ushort);
template <class T> T simd_shuffle_down(T, ushort);
template <class T> T simd_broadcast(T, ushort);
template <class T> T simd_broadcast_first(T);
struct simd_vote {
  typedef ulong vote_t;
  explicit operator vote_t() const;
  bool all() const;
  bool any() const;
};
simd_vote simd_ballot(bool);
bool simd_all(bool);
bool simd_any(bool);
#define DS4_LINT_INTEGER(name) \
  template <class T> T name(T); \
  void name(float) = delete;
DS4_LINT_INTEGER(simd_sum)
DS4_LINT_INTEGER(simd_min)
DS4_LINT_INTEGER(simd_max)
DS4_LINT_INTEGER(simd_or)
DS4_LINT_INTEGER(simd_and)
DS4_LINT_INTEGER(simd_prefix_exclusive_sum)
DS4_LINT_INTEGER(simd_prefix_inclusive_sum)

enum memory_order { memory_order_relaxed };
struct atomic_uint {
  uint value;
};
struct atomic_int {
  int value;
};
#define DS4_LINT_ATOMIC(A, T, space)                                                                              \
  T atomic_load_explicit(const space A*, memory_order);                                                           \
  void atomic_store_explicit(space A*, T, memory_order);                                                          \
  T atomic_exchange_explicit(space A*, T, memory_order);                                                          \
  T atomic_fetch_add_explicit(space A*, T, memory_order);                                                         \
  T atomic_fetch_sub_explicit(space A*, T, memory_order);                                                         \
  T atomic_fetch_or_explicit(space A*, T, memory_order);                                                          \
  T atomic_fetch_and_explicit(space A*, T, memory_order);                                                         \
  T atomic_fetch_xor_explicit(space A*, T, memory_order);                                                         \
  T atomic_fetch_max_explicit(space A*, T, memory_order);                                                         \
  T atomic_fetch_min_explicit(space A*, T, memory_order);                                                         \
  bool atomic_compare_exchange_weak_explicit(space A*, T*, T, memory_order, memory_order);
DS4_LINT_ATOMIC(atomic_uint, uint, device)
DS4_LINT_ATOMIC(atomic_uint, uint, threadgroup)
DS4_LINT_ATOMIC(atomic_int, int, device)
DS4_LINT_ATOMIC(atomic_int, int, threadgroup)

#include "compat.h"
#pragma GCC poison double
