// MSL's vector types for kernels on the CPU: structs with components and the swizzles of docs/metal.md.
#pragma once

#include <cstdint>
#include <type_traits>

namespace metal {

using uchar = uint8_t;
using ushort = uint16_t;
using uint = uint32_t;
using ulong = uint64_t;

template <class T, int N>
struct vec;

template <class T, int N, int... I>
struct Swizzle {  // a view of some components; shares the memory of its vector
  T data[N];
  operator vec<T, sizeof...(I)>() const { return vec<T, sizeof...(I)>(data[I]...); }
  Swizzle& operator=(const vec<T, sizeof...(I)>& v) {
    int k = 0;
    ((data[I] = v[k++]), ...);
    return *this;
  }
};

#define DS4_VEC_COMMON(T, N)                                     \
  vec() = default;                                               \
  T& operator[](int i) { return data[i]; }                       \
  const T& operator[](int i) const { return data[i]; }           \
  explicit vec(T s) { for (int i = 0; i < N; ++i) data[i] = s; } \
  template <class U>                                             \
    requires(!std::is_same_v<U, T>)                              \
  explicit vec(const vec<U, N>& v) {                             \
    for (int i = 0; i < N; ++i) data[i] = static_cast<T>(v[i]);  \
  }

template <class T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
  union {
    T data[2];
    struct { T x, y; };
    Swizzle<T, 2, 1, 0> yx;
  };
  DS4_VEC_COMMON(T, 2)
  vec(T a, T b) : data{a, b} {}
};

template <class T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
  union {
    T data[4];
    struct { T x, y, z; };
    Swizzle<T, 3, 0, 1> xy;
    Swizzle<T, 3, 1, 2> yz;
  };
  DS4_VEC_COMMON(T, 3)
  vec(T a, T b, T c) : data{a, b, c, T()} {}
};

template <class T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
  union {
    T data[4];
    struct { T x, y, z, w; };
    Swizzle<T, 4, 0, 1> xy;
    Swizzle<T, 4, 2, 3> zw;
    Swizzle<T, 4, 0, 2> xz;
    Swizzle<T, 4, 1, 3> yw;
    Swizzle<T, 4, 0, 1, 2> xyz;
  };
  DS4_VEC_COMMON(T, 4)
  vec(T a, T b, T c, T d) : data{a, b, c, d} {}
  vec(const vec<T, 2>& a, const vec<T, 2>& b) : data{a[0], a[1], b[0], b[1]} {}
};
#undef DS4_VEC_COMMON

template <class A>
struct VecTraits : std::false_type {};
template <class T, int N>
struct VecTraits<vec<T, N>> : std::true_type {
  using type = vec<T, N>;
  using scalar = T;
  static constexpr int n = N;
};
template <class T, int N, int... I>
struct VecTraits<Swizzle<T, N, I...>> : VecTraits<vec<T, sizeof...(I)>> {};
template <class A>
concept VecLike = VecTraits<A>::value;

template <class V, class A>
inline V widen(const A& a) {
  if constexpr (VecLike<A>) {
    static_assert(std::is_same_v<typename VecTraits<A>::type, V>, "vectors of two types: convert one, e.g. float4(h)");
    return a;
  } else {
    return V(static_cast<typename VecTraits<V>::scalar>(a));
  }
}
template <class A, class B>
struct Common : VecTraits<std::conditional_t<VecLike<A>, A, B>> {};

#define DS4_VEC_BINARY(op)                                                                    \
  template <class A, class B>                                                                 \
    requires(VecLike<A> || VecLike<B>)                                                        \
  inline auto operator op(const A& a, const B& b) {                                           \
    using V = typename Common<A, B>::type;                                                    \
    const V l = widen<V>(a), r = widen<V>(b);                                                 \
    V out;                                                                                    \
    for (int i = 0; i < Common<A, B>::n; ++i)                                                 \
      out[i] = static_cast<typename Common<A, B>::scalar>(l[i] op r[i]);                      \
    return out;                                                                               \
  }                                                                                           \
  template <class A, class B>                                                                 \
    requires(VecLike<A>)                                                                      \
  inline A& operator op##=(A& a, const B& b) {                                                \
    return a = a op b;                                                                        \
  }
DS4_VEC_BINARY(+)
DS4_VEC_BINARY(-)
DS4_VEC_BINARY(*)
DS4_VEC_BINARY(/)
DS4_VEC_BINARY(&)
DS4_VEC_BINARY(|)
DS4_VEC_BINARY(^)
DS4_VEC_BINARY(<<)
DS4_VEC_BINARY(>>)
#undef DS4_VEC_BINARY
template <VecLike A>
inline auto operator-(const A& a) {
  typename VecTraits<A>::type v = a;
  for (int i = 0; i < VecTraits<A>::n; ++i) v[i] = -v[i];
  return v;
}

#define DS4_VEC_NAMES(name, T)   \
  using name##2 = vec<T, 2>;     \
  using name##3 = vec<T, 3>;     \
  using name##4 = vec<T, 4>;
DS4_VEC_NAMES(float, float)
DS4_VEC_NAMES(int, int32_t)
DS4_VEC_NAMES(uint, uint32_t)
DS4_VEC_NAMES(short, int16_t)
DS4_VEC_NAMES(ushort, uint16_t)
DS4_VEC_NAMES(char, int8_t)
DS4_VEC_NAMES(uchar, uint8_t)
#undef DS4_VEC_NAMES

// Storage only: canonical arithmetic is in f32, so two halves have no operators here (Metal would round each result).
struct half {
  uint16_t bits;
  half() = default;
  explicit half(float value) {
    const uint32_t u = __builtin_bit_cast(uint32_t, value), sign = (u >> 16) & 0x8000u, m = u & 0x7fffffffu;
    uint32_t code;
    if (m > 0x7f800000u) code = 0x7e00u;
    else if (m >= 0x477ff000u) code = 0x7c00u;
    else if (m >= 0x38800000u) code = (m - 0x38000000u + 0xfffu + ((m >> 13) & 1u)) >> 13;
    else if (m < 0x33000000u) code = 0;
    else {
      const uint32_t shift = 126u - (m >> 23), mantissa = (m & 0x7fffffu) | 0x800000u;
      const uint32_t kept = mantissa >> shift, rest = mantissa & ((1u << shift) - 1u), middle = 1u << (shift - 1u);
      code = kept + ((rest > middle || (rest == middle && (kept & 1u))) ? 1u : 0u);
    }
    bits = static_cast<uint16_t>(sign | code);
  }
  operator float() const {  // subnormals of the format are normal in f32: built without an f32 subnormal on the way
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16, e = (bits >> 10) & 31u, m = bits & 0x3ffu;
    const uint32_t small = __builtin_bit_cast(uint32_t, static_cast<float>(m) * 0x1p-24f);
    const uint32_t big = ((e == 31u ? 255u : e + 112u) << 23) | (m << 13);
    return __builtin_bit_cast(float, sign | (e == 0 ? small : big));
  }
};
half operator+(half, half) = delete;
half operator-(half, half) = delete;
half operator*(half, half) = delete;
half operator/(half, half) = delete;
using half2 = vec<half, 2>;
using half4 = vec<half, 4>;

struct packed_float3 {
  float x, y, z;
};

}  // namespace metal
