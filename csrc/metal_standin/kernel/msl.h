// The part of MSL that kernels may use, on the CPU. Included at global scope ahead of every translated .metal file.
// Missing on purpose: everything whose result Metal does not define to the bit (exp, rsqrt, float simd_sum, ...);
// metal/numerics.h has those.
#pragma once

#include "metal_standin/kernel/abi.h"
#include "metal_standin/kernel/vectors.h"

#define DS4_STANDIN_KERNEL 1
#define DS4_HERE_PARAMS const char *file_ = __builtin_FILE(), int line_ = __builtin_LINE()
#define DS4_HERE(what) \
  ds4::standin::Site { file_, line_, what }

namespace metal {

// ---------------------------------------------------------------- arithmetic that IEEE 754 or integers define exactly

template <class To, class From>
inline To as_type(const From& x) {
  static_assert(sizeof(To) == sizeof(From), "as_type between types of two sizes");
  return __builtin_bit_cast(To, x);
}
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float sqrt(float x) { return __builtin_sqrtf(x); }
inline float fabs(float x) { return __builtin_fabsf(x); }
inline float abs(float x) { return __builtin_fabsf(x); }
inline float floor(float x) { return __builtin_floorf(x); }
inline float ceil(float x) { return __builtin_ceilf(x); }
inline float trunc(float x) { return __builtin_truncf(x); }
inline float rint(float x) { return __builtin_rintf(x); }
inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline int abs(int x) { return x < 0 ? -x : x; }

// Integers only: Metal's float min and max leave NaN and the sign of zero open. Use ds4_min and ds4_max.
template <class T>
  requires(std::is_integral_v<T>)
inline T min(T a, T b) { return a < b ? a : b; }
template <class T>
  requires(std::is_integral_v<T>)
inline T max(T a, T b) { return a > b ? a : b; }
template <class T>
  requires(std::is_integral_v<T>)
inline T clamp(T x, T low, T high) { return min(max(x, low), high); }
float min(float, float) = delete;
float max(float, float) = delete;
float clamp(float, float, float) = delete;

template <class T>
inline T select(T if_false, T if_true, bool condition) { return condition ? if_true : if_false; }
inline uint popcount(uint x) { return static_cast<uint>(__builtin_popcount(x)); }
inline uint clz(uint x) { return x == 0 ? 32u : static_cast<uint>(__builtin_clz(x)); }
inline uint ctz(uint x) { return x == 0 ? 32u : static_cast<uint>(__builtin_ctz(x)); }
inline uint mulhi(uint a, uint b) { return static_cast<uint>((static_cast<ulong>(a) * b) >> 32); }

// ---------------------------------------------------------------- synchronisation

enum class mem_flags : unsigned { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
inline mem_flags operator|(mem_flags a, mem_flags b) {
  return static_cast<mem_flags>(static_cast<unsigned>(a) | static_cast<unsigned>(b));
}
inline void threadgroup_barrier(mem_flags flags, DS4_HERE_PARAMS) {
  ds4::standin::threadgroup_wait(static_cast<unsigned>(flags), DS4_HERE("threadgroup_barrier"));
}
inline void simdgroup_barrier(mem_flags flags, DS4_HERE_PARAMS) {
  ds4::standin::simd_wait(static_cast<unsigned>(flags), DS4_HERE("simdgroup_barrier"));
}

// ---------------------------------------------------------------- lanes of a simdgroup

#if defined(DS4_STANDIN_CHECKED)
#define DS4_UNWATCHED __attribute__((no_sanitize("thread"), noinline)) static
#else
#define DS4_UNWATCHED inline
#endif

template <class T>
DS4_UNWATCHED T lane_value(const ds4::standin::Slot* slots, uint lane) {
  T value;
  __builtin_memcpy(&value, &slots[lane], sizeof(T));
  return value;
}
template <class T>
DS4_UNWATCHED const ds4::standin::Slot* meet(T value, const ds4::standin::Site& site) {
  static_assert(sizeof(T) <= sizeof(ds4::standin::Slot));
  return ds4::standin::simd_meet(&value, sizeof(T), site);
}

template <class T>
inline T simd_shuffle(T value, ushort lane, DS4_HERE_PARAMS) {
  return lane_value<T>(meet(value, DS4_HERE("simd_shuffle")), lane & 31u);
}
template <class T>
inline T simd_shuffle_xor(T value, ushort mask, DS4_HERE_PARAMS) {
  return lane_value<T>(meet(value, DS4_HERE("simd_shuffle_xor")),
                       (static_cast<uint>(ds4::standin::lane_of_caller()) ^ mask) & 31u);
}
// The lanes at the edge keep their own value; Metal leaves it undefined, so do not use it.
template <class T>
inline T simd_shuffle_down(T value, ushort delta, DS4_HERE_PARAMS) {
  const uint lane = static_cast<uint>(ds4::standin::lane_of_caller());
  return lane_value<T>(meet(value, DS4_HERE("simd_shuffle_down")), lane + delta < 32u ? lane + delta : lane);
}
template <class T>
inline T simd_shuffle_up(T value, ushort delta, DS4_HERE_PARAMS) {
  const uint lane = static_cast<uint>(ds4::standin::lane_of_caller());
  return lane_value<T>(meet(value, DS4_HERE("simd_shuffle_up")), lane >= delta ? lane - delta : lane);
}
template <class T>
inline T simd_broadcast(T value, ushort lane, DS4_HERE_PARAMS) {
  return lane_value<T>(meet(value, DS4_HERE("simd_broadcast")), lane & 31u);
}
template <class T>
inline T simd_broadcast_first(T value, DS4_HERE_PARAMS) {
  return lane_value<T>(meet(value, DS4_HERE("simd_broadcast_first")), 0);
}

struct simd_vote {
  using vote_t = ulong;
  vote_t bits;
  explicit operator vote_t() const { return bits; }
  bool all() const { return bits == 0xffffffffu; }
  bool any() const { return bits != 0; }
};
inline simd_vote simd_ballot(bool value, DS4_HERE_PARAMS) {
  const ds4::standin::Slot* slots = meet(value, DS4_HERE("simd_ballot"));
  ulong bits = 0;
  for (uint i = 0; i < 32; ++i) bits |= static_cast<ulong>(lane_value<bool>(slots, i)) << i;
  return simd_vote{bits};
}
inline bool simd_all(bool value, DS4_HERE_PARAMS) { return simd_ballot(value, file_, line_).all(); }
inline bool simd_any(bool value, DS4_HERE_PARAMS) { return simd_ballot(value, file_, line_).any(); }

// Sums of integers have no order; sums of floats do, so those are written out with simd_shuffle_xor.
#define DS4_SIMD_REDUCE(name, combine)                                      \
  template <class T>                                                        \
    requires(std::is_integral_v<T> && sizeof(T) <= 4)                       \
  inline T name(T value, DS4_HERE_PARAMS) {                                 \
    const ds4::standin::Slot* slots = meet(value, DS4_HERE(#name));         \
    T a = lane_value<T>(slots, 0);                                          \
    for (uint i = 1; i < 32; ++i) {                                         \
      const T b = lane_value<T>(slots, i);                                  \
      a = static_cast<T>(combine);                                          \
    }                                                                       \
    return a;                                                               \
  }                                                                         \
  float name(float) = delete;
DS4_SIMD_REDUCE(simd_sum, a + b)
DS4_SIMD_REDUCE(simd_min, a < b ? a : b)
DS4_SIMD_REDUCE(simd_max, a > b ? a : b)
DS4_SIMD_REDUCE(simd_or, a | b)
DS4_SIMD_REDUCE(simd_and, a & b)
#undef DS4_SIMD_REDUCE
template <class T>
  requires(std::is_integral_v<T> && sizeof(T) <= 4)
inline T simd_prefix_exclusive_sum(T value, DS4_HERE_PARAMS) {
  const ds4::standin::Slot* slots = meet(value, DS4_HERE("simd_prefix_exclusive_sum"));
  T a = 0;
  for (uint i = 0; i < static_cast<uint>(ds4::standin::lane_of_caller()); ++i) a += lane_value<T>(slots, i);
  return a;
}
template <class T>
  requires(std::is_integral_v<T> && sizeof(T) <= 4)
inline T simd_prefix_inclusive_sum(T value, DS4_HERE_PARAMS) {
  return static_cast<T>(simd_prefix_exclusive_sum(value, file_, line_) + value);
}

// ---------------------------------------------------------------- atomics (relaxed, 32 bits)

enum memory_order { memory_order_relaxed };
template <class T>
struct atomic {
  T value;
};
using atomic_uint = atomic<uint>;
using atomic_int = atomic<int>;

#if defined(DS4_STANDIN_CHECKED)
inline void note_atomic(const void* p, bool writes) { ds4::standin::note_atomic(p, 4, writes); }
#else
inline void note_atomic(const void*, bool) {}
#endif

template <class T>
DS4_UNWATCHED T atomic_load_explicit(const atomic<T>* p, memory_order) {
  note_atomic(p, false);
  return __atomic_load_n(&p->value, __ATOMIC_RELAXED);
}
template <class T>
DS4_UNWATCHED void atomic_store_explicit(atomic<T>* p, std::type_identity_t<T> v, memory_order) {
  note_atomic(p, true);
  __atomic_store_n(&p->value, v, __ATOMIC_RELAXED);
}
#define DS4_ATOMIC_FETCH(name, builtin)                                                         \
  template <class T>                                                                            \
  DS4_UNWATCHED T atomic_##name##_explicit(atomic<T>* p, std::type_identity_t<T> v, memory_order) { \
    note_atomic(p, true);                                                                       \
    return builtin(&p->value, v, __ATOMIC_RELAXED);                                             \
  }
DS4_ATOMIC_FETCH(exchange, __atomic_exchange_n)
DS4_ATOMIC_FETCH(fetch_add, __atomic_fetch_add)
DS4_ATOMIC_FETCH(fetch_sub, __atomic_fetch_sub)
DS4_ATOMIC_FETCH(fetch_or, __atomic_fetch_or)
DS4_ATOMIC_FETCH(fetch_and, __atomic_fetch_and)
DS4_ATOMIC_FETCH(fetch_xor, __atomic_fetch_xor)
#undef DS4_ATOMIC_FETCH
template <class T>
DS4_UNWATCHED bool atomic_compare_exchange_weak_explicit(atomic<T>* p, T* expected, std::type_identity_t<T> desired,
                                                         memory_order, memory_order) {
  note_atomic(p, true);
  return __atomic_compare_exchange_n(&p->value, expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}
#define DS4_ATOMIC_PICK(name, better)                                                                      \
  template <class T>                                                                                       \
  DS4_UNWATCHED T atomic_##name##_explicit(atomic<T>* p, std::type_identity_t<T> v, memory_order) {        \
    note_atomic(p, true);                                                                                  \
    T old = __atomic_load_n(&p->value, __ATOMIC_RELAXED);                                                  \
    while (v better old &&                                                                                 \
           !__atomic_compare_exchange_n(&p->value, &old, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {} \
    return old;                                                                                            \
  }
DS4_ATOMIC_PICK(fetch_max, >)
DS4_ATOMIC_PICK(fetch_min, <)
#undef DS4_ATOMIC_PICK

}  // namespace metal

// ---------------------------------------------------------------- glue for the generated code

#if defined(DS4_STANDIN_CHECKED)  // kept apart from its thunk, which reads the runtime's memory and is not watched
#define DS4_KERNEL __attribute__((noinline)) static
#define DS4_THUNK __attribute__((no_sanitize("thread"))) static
#else
#define DS4_KERNEL static
#define DS4_THUNK static
#endif

namespace ds4::standin {

struct AnyPointer {
  void* p;
  template <class T>
  operator T*() const { return static_cast<T*>(p); }
};
struct AnyReference {
  void* p;
  template <class T>
  operator T&() const { return *static_cast<T*>(p); }
};
struct Built {  // a built-in of three components, taken as uint, uint2 or uint3
  Grid3 g;
  operator metal::uint() const { return g.x; }
  operator metal::ushort() const { return static_cast<metal::ushort>(g.x); }
  operator metal::uint2() const { return {g.x, g.y}; }
  operator metal::uint3() const { return {g.x, g.y, g.z}; }
};

struct Layout {
  uint32_t size, alignment;
};
template <class P>
constexpr Layout layout_of() {
  using T = std::remove_cv_t<std::remove_pointer_t<std::remove_cvref_t<P>>>;
  if constexpr (std::is_void_v<T>) return {1, 1};
  else return {sizeof(T), alignof(T)};
}
template <class... P>
constexpr Layout param_layout(void (*)(P...), int i) {
  const Layout all[] = {layout_of<P>()...};
  return all[i];
}

}  // namespace ds4::standin

#include "compat.h"
