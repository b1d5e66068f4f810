// The part of MSL that kernels may use, in CUDA C++ without any header. Ahead of every translated .metal file.
// The counterpart of csrc/metal_standin/kernel/msl.h; what is missing there is missing here.
#define DS4_CUDA_KERNEL 1
#define DS4_DEVICE static __device__ __forceinline__
#define DS4_MEMBER __device__ __forceinline__
#define DS4_KERNEL static __device__ __forceinline__
#ifndef DS4_THREADS
#define DS4_THREADS 1024
#endif
#define DS4_BLOCKS 1  // threadgroups of a multiprocessor that registers must leave room for; a family may ask for more

typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;

struct ds4_pointer {  // becomes whatever pointer the kernel takes
  void* p;
  template <class T>
  DS4_MEMBER operator T*() const { return static_cast<T*>(p); }
};
struct ds4_reference {
  void* p;
  template <class T>
  DS4_MEMBER operator T&() const { return *static_cast<T*>(p); }
};

namespace metal {  // first here, so that these names are found before CUDA's

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;

// ---------------------------------------------------------------- vectors

template <class A, class B> struct ds4_same { static constexpr bool value = false; };
template <class A> struct ds4_same<A, A> { static constexpr bool value = true; };
template <bool B, class T> struct ds4_if {};
template <class T> struct ds4_if<true, T> { typedef T type; };
template <class T> struct ds4_identity { typedef T type; };

template <class T, int N> struct vec;

template <class T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
  T x, y;
  vec() = default;
  DS4_MEMBER vec(T a) : x(a), y(a) {}
  DS4_MEMBER vec(T a, T b) : x(a), y(b) {}
  template <class U> DS4_MEMBER explicit vec(const vec<U, 2>& v) : x(T(v.x)), y(T(v.y)) {}
  DS4_MEMBER T& operator[](int i) { return i == 0 ? x : y; }
  DS4_MEMBER T operator[](int i) const { return i == 0 ? x : y; }
};
template <class T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
  T x, y, z;
  vec() = default;
  DS4_MEMBER vec(T a) : x(a), y(a), z(a) {}
  DS4_MEMBER vec(T a, T b, T c) : x(a), y(b), z(c) {}
  template <class U> DS4_MEMBER explicit vec(const vec<U, 3>& v) : x(T(v.x)), y(T(v.y)), z(T(v.z)) {}
  DS4_MEMBER T& operator[](int i) { return i == 0 ? x : i == 1 ? y : z; }
  DS4_MEMBER T operator[](int i) const { return i == 0 ? x : i == 1 ? y : z; }
};
template <class T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
  T x, y, z, w;
  vec() = default;
  DS4_MEMBER vec(T a) : x(a), y(a), z(a), w(a) {}
  DS4_MEMBER vec(T a, T b, T c, T d) : x(a), y(b), z(c), w(d) {}
  DS4_MEMBER vec(const vec<T, 2>& a, const vec<T, 2>& b) : x(a.x), y(a.y), z(b.x), w(b.y) {}
  template <class U> DS4_MEMBER explicit vec(const vec<U, 4>& v) : x(T(v.x)), y(T(v.y)), z(T(v.z)), w(T(v.w)) {}
  DS4_MEMBER T& operator[](int i) { return i == 0 ? x : i == 1 ? y : i == 2 ? z : w; }
  DS4_MEMBER T operator[](int i) const { return i == 0 ? x : i == 1 ? y : i == 2 ? z : w; }
};

#define DS4_BINARY(op)                                                                                            \
  template <class T, int N> DS4_DEVICE vec<T, N> operator op(const vec<T, N>& a, const vec<T, N>& b) {            \
    vec<T, N> r;                                                                                                  \
    _Pragma("unroll") for (int i = 0; i < N; ++i) r[i] = T(a[i] op b[i]);                                         \
    return r;                                                                                                     \
  }                                                                                                               \
  template <class T, int N> DS4_DEVICE vec<T, N> operator op(const vec<T, N>& a, typename ds4_identity<T>::type b) { \
    return a op vec<T, N>(b);                                                                                     \
  }                                                                                                               \
  template <class T, int N> DS4_DEVICE vec<T, N> operator op(typename ds4_identity<T>::type a, const vec<T, N>& b) { \
    return vec<T, N>(a) op b;                                                                                     \
  }                                                                                                               \
  template <class T, int N, class B> DS4_DEVICE vec<T, N>& operator op##=(vec<T, N>& a, const B& b) {             \
    return a = a op b;                                                                                            \
  }
DS4_BINARY(+)
DS4_BINARY(-)
DS4_BINARY(*)
DS4_BINARY(/)
DS4_BINARY(&)
DS4_BINARY(|)
DS4_BINARY(^)
DS4_BINARY(<<)
DS4_BINARY(>>)
#undef DS4_BINARY

#define DS4_NAMES(name, T)    \
  typedef vec<T, 2> name##2;  \
  typedef vec<T, 3> name##3;  \
  typedef vec<T, 4> name##4;
DS4_NAMES(float, float)
DS4_NAMES(int, int)
DS4_NAMES(uint, uint)
DS4_NAMES(short, short)
DS4_NAMES(ushort, ushort)
DS4_NAMES(char, signed char)
DS4_NAMES(uchar, uchar)
#undef DS4_NAMES

struct half {  // storage only: conversions, each rounded to nearest even
  ushort bits;
  half() = default;
  DS4_MEMBER explicit half(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  DS4_MEMBER explicit operator float() const {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
  }
};
typedef vec<half, 2> half2;
typedef vec<half, 4> half4;

// ---------------------------------------------------------------- arithmetic that IEEE 754 or integers define exactly

template <class To, class From> DS4_DEVICE To as_type(const From& x) {
  static_assert(sizeof(To) == sizeof(From), "as_type between types of two sizes");
  union Both { From from; To to; DS4_MEMBER Both() {} } both;
  both.from = x;
  return both.to;
}
DS4_DEVICE float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
template <int N> DS4_DEVICE vec<float, N> fma(const vec<float, N>& a, const vec<float, N>& b, const vec<float, N>& c) {
  vec<float, N> r;
  _Pragma("unroll") for (int i = 0; i < N; ++i) r[i] = __fmaf_rn(a[i], b[i], c[i]);
  return r;
}
DS4_DEVICE float sqrt(float x) { return __fsqrt_rn(x); }
DS4_DEVICE float fabs(float x) { return __int_as_float(__float_as_int(x) & 0x7fffffff); }
DS4_DEVICE float abs(float x) { return fabs(x); }
DS4_DEVICE int abs(int x) { return x < 0 ? -x : x; }
DS4_DEVICE float floor(float x) { return ::floorf(x); }
DS4_DEVICE float ceil(float x) { return ::ceilf(x); }
DS4_DEVICE float trunc(float x) { return ::truncf(x); }
DS4_DEVICE float rint(float x) { return ::rintf(x); }
DS4_DEVICE bool isnan(float x) { return x != x; }
DS4_DEVICE bool isinf(float x) { return fabs(x) == __int_as_float(0x7f800000); }
template <class T> struct ds4_integer { static constexpr bool value = !ds4_same<T, float>::value; };
template <class T> DS4_DEVICE typename ds4_if<ds4_integer<T>::value, T>::type min(T a, T b) { return a < b ? a : b; }
template <class T> DS4_DEVICE typename ds4_if<ds4_integer<T>::value, T>::type max(T a, T b) { return a > b ? a : b; }
template <class T> DS4_DEVICE typename ds4_if<ds4_integer<T>::value, T>::type clamp(T x, T low, T high) { return min(max(x, low), high); }
template <class T> DS4_DEVICE T select(T if_false, T if_true, bool condition) { return condition ? if_true : if_false; }
DS4_DEVICE uint popcount(uint x) { return __popc(x); }
DS4_DEVICE uint clz(uint x) { return __clz(x); }
DS4_DEVICE uint ctz(uint x) { return x == 0 ? 32u : __ffs(x) - 1; }
DS4_DEVICE uint mulhi(uint a, uint b) { return __umulhi(a, b); }

// ---------------------------------------------------------------- synchronisation and lanes: a simdgroup is a warp

enum class mem_flags : unsigned { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
DS4_DEVICE mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(unsigned(a) | unsigned(b)); }
DS4_DEVICE void threadgroup_barrier(mem_flags) { __syncthreads(); }
DS4_DEVICE void simdgroup_barrier(mem_flags) { __syncwarp(); }

template <class T, class F> DS4_DEVICE T ds4_by_words(T value, F f) {
  union Both { T value; int word[(sizeof(T) + 3) / 4]; DS4_MEMBER Both() {} } both;
  both.word[(sizeof(T) + 3) / 4 - 1] = 0;
  both.value = value;
  _Pragma("unroll") for (int i = 0; i < int((sizeof(T) + 3) / 4); ++i) both.word[i] = f(both.word[i]);
  return both.value;
}
template <class T> DS4_DEVICE T simd_shuffle(T v, ushort lane) {
  return ds4_by_words(v, [=](int w) { return __shfl_sync(0xffffffffu, w, lane); });
}
template <class T> DS4_DEVICE T simd_shuffle_xor(T v, ushort mask) {
  return ds4_by_words(v, [=](int w) { return __shfl_xor_sync(0xffffffffu, w, mask); });
}
template <class T> DS4_DEVICE T simd_shuffle_down(T v, ushort n) {
  return ds4_by_words(v, [=](int w) { return __shfl_down_sync(0xffffffffu, w, n); });
}
template <class T> DS4_DEVICE T simd_shuffle_up(T v, ushort n) {
  return ds4_by_words(v, [=](int w) { return __shfl_up_sync(0xffffffffu, w, n); });
}
template <class T> DS4_DEVICE T simd_broadcast(T v, ushort lane) { return simd_shuffle(v, lane); }
template <class T> DS4_DEVICE T simd_broadcast_first(T v) { return simd_shuffle(v, 0); }
struct simd_vote {
  typedef ulong vote_t;
  vote_t bits;
  DS4_MEMBER explicit operator vote_t() const { return bits; }
  DS4_MEMBER bool all() const { return bits == 0xffffffffu; }
  DS4_MEMBER bool any() const { return bits != 0; }
};
DS4_DEVICE simd_vote simd_ballot(bool v) { return simd_vote{__ballot_sync(0xffffffffu, v)}; }
DS4_DEVICE bool simd_all(bool v) { return __all_sync(0xffffffffu, v); }
DS4_DEVICE bool simd_any(bool v) { return __any_sync(0xffffffffu, v); }
#define DS4_REDUCE(name, combine)                                                                   \
  template <class T> DS4_DEVICE typename ds4_if<ds4_integer<T>::value, T>::type name(T a) {         \
    _Pragma("unroll") for (int m = 1; m < 32; m *= 2) {                                             \
      const T b = simd_shuffle_xor(a, ushort(m));                                                   \
      a = T(combine);                                                                               \
    }                                                                                               \
    return a;                                                                                       \
  }
DS4_REDUCE(simd_sum, a + b)
DS4_REDUCE(simd_min, a < b ? a : b)
DS4_REDUCE(simd_max, a > b ? a : b)
DS4_REDUCE(simd_or, a | b)
DS4_REDUCE(simd_and, a & b)
#undef DS4_REDUCE
// One instruction where the whole word is the number (compute capability 8.0).
DS4_DEVICE uint simd_sum(uint a) { return __reduce_add_sync(0xffffffffu, a); }
DS4_DEVICE uint simd_min(uint a) { return __reduce_min_sync(0xffffffffu, a); }
DS4_DEVICE uint simd_max(uint a) { return __reduce_max_sync(0xffffffffu, a); }
DS4_DEVICE uint simd_or(uint a) { return __reduce_or_sync(0xffffffffu, a); }
DS4_DEVICE uint simd_and(uint a) { return __reduce_and_sync(0xffffffffu, a); }
DS4_DEVICE int simd_sum(int a) { return __reduce_add_sync(0xffffffffu, a); }
DS4_DEVICE int simd_min(int a) { return __reduce_min_sync(0xffffffffu, a); }
DS4_DEVICE int simd_max(int a) { return __reduce_max_sync(0xffffffffu, a); }
DS4_DEVICE uint ds4_index() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
template <class T> DS4_DEVICE T simd_prefix_inclusive_sum(T v) {
  const uint lane = ds4_index() & 31u;
  _Pragma("unroll") for (uint m = 1; m < 32; m *= 2) {
    const T below = simd_shuffle_up(v, ushort(m));
    v = T(lane >= m ? v + below : v);
  }
  return v;
}
template <class T> DS4_DEVICE T simd_prefix_exclusive_sum(T v) { return T(simd_prefix_inclusive_sum(v) - v); }

// ---------------------------------------------------------------- atomics (relaxed, 32 bits)

enum memory_order { memory_order_relaxed };
template <class T> struct atomic { T value; };
typedef atomic<uint> atomic_uint;
typedef atomic<int> atomic_int;
template <class T> DS4_DEVICE T atomic_load_explicit(const atomic<T>* p, memory_order) { return *(const volatile T*)&p->value; }
template <class T> DS4_DEVICE void atomic_store_explicit(atomic<T>* p, typename ds4_identity<T>::type v, memory_order) {
  *(volatile T*)&p->value = v;
}
#define DS4_ATOMIC(name, function)                                                                                        \
  template <class T> DS4_DEVICE T atomic_##name##_explicit(atomic<T>* p, typename ds4_identity<T>::type v, memory_order) { \
    return function(&p->value, v);                                                                                        \
  }
DS4_ATOMIC(exchange, atomicExch)
DS4_ATOMIC(fetch_add, atomicAdd)
DS4_ATOMIC(fetch_sub, atomicSub)
DS4_ATOMIC(fetch_or, atomicOr)
DS4_ATOMIC(fetch_and, atomicAnd)
DS4_ATOMIC(fetch_xor, atomicXor)
DS4_ATOMIC(fetch_max, atomicMax)
DS4_ATOMIC(fetch_min, atomicMin)
#undef DS4_ATOMIC
template <class T>
DS4_DEVICE bool atomic_compare_exchange_weak_explicit(atomic<T>* p, T* expected, typename ds4_identity<T>::type desired, memory_order,
                                                      memory_order) {
  const T old = atomicCAS(&p->value, *expected, desired);
  const bool same = old == *expected;
  *expected = old;
  return same;
}

// ---------------------------------------------------------------- copies into threadgroup memory that a thread does not wait for

DS4_DEVICE uint ds4_shared_address(const void* p) { return uint(__cvta_generic_to_shared(p)); }
DS4_DEVICE void ds4_copy_16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(ds4_shared_address(to)), "l"(from) : "memory");
}
DS4_DEVICE void ds4_copy_8(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(ds4_shared_address(to)), "l"(from) : "memory");
}
// Copies since the last end are a group; waits until at most N groups of this thread are on their way.
DS4_DEVICE void ds4_copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DS4_DEVICE void ds4_copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// ---------------------------------------------------------------- built-ins

struct ds4_three {
  uint x, y, z;
};
template <class T> DS4_DEVICE ds4_three ds4_triple(const T& t) { return ds4_three{t.x, t.y, t.z}; }
DS4_DEVICE ds4_three ds4_in_grid() {
  return ds4_three{blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y, blockIdx.z * blockDim.z + threadIdx.z};
}
DS4_DEVICE ds4_three ds4_grid() { return ds4_three{gridDim.x * blockDim.x, gridDim.y * blockDim.y, gridDim.z * blockDim.z}; }
DS4_DEVICE uint ds4_simdgroups() { return (blockDim.x * blockDim.y * blockDim.z + 31u) / 32u; }

}  // namespace metal
