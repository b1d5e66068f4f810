// The prelude of every file in metal/: one source for Apple's Metal compiler, for the stand-in on Linux, for the lint
// and for the C++ host, which shares the argument structs. Included first, everywhere. See docs/metal.md.
//
// Names offered beside plain MSL:
//   KERNEL_INLINE                       in front of every helper function
//   FUNCTION_CONSTANT(type, name, i)    a constant that the host sets when it makes the pipeline
//   CONSTANT_TABLE(type, name, n)       a table at program scope: CONSTANT_TABLE(float, kScale, 4) = {1, 2, 3, 4};
//   EXPORT_KERNEL("name", fn, args...)  exports fn<args...> under a name that the host asks for; one per line
#ifndef DS4_COMPAT_H
#define DS4_COMPAT_H

#if defined(__METAL_VERSION__)
#include <metal_stdlib>
// The host also asks for safe math; these two make the text right by itself.
#if __METAL_VERSION__ >= 320
#pragma METAL fp math_mode(safe)
#pragma METAL fp contract(off)
#else
#pragma clang fp contract(off)
#endif
using namespace metal;
#define KERNEL_INLINE static inline
#define FUNCTION_CONSTANT(type, name, index) constant type name [[function_constant(index)]]
#define CONSTANT_TABLE(type, name, n) constant type name[n]
#define EXPORT_KERNEL(host, fn, ...) template [[host_name(host)]] [[kernel]] decltype(fn<__VA_ARGS__>) fn<__VA_ARGS__>
#define DS4_SQRT(x) precise::sqrt(x)

#elif defined(DS4_STANDIN_KERNEL)  // the generator has translated the text; csrc/metal_standin/kernel/msl.h is included
#define KERNEL_INLINE static inline
#define FUNCTION_CONSTANT(type, name, index) static type name
#define CONSTANT_TABLE(type, name, n) static const type name[n]
#define DS4_SQRT(x) __builtin_sqrtf(x)

#elif defined(DS4_CUDA_KERNEL)  // translated by generate_cuda.py; csrc/cuda/msl.h is ahead of it
#define KERNEL_INLINE static __device__ __forceinline__
#define FUNCTION_CONSTANT(type, name, index) static constexpr type name = type(DS4_CONSTANT_##index)
#define CONSTANT_TABLE(type, name, n) static __device__ const type name[n]
#define DS4_SQRT(x) __fsqrt_rn(x)

#elif defined(DS4_LINT)  // clang with real address spaces; tests/standin/lint/msl_lint.h is included
#define KERNEL_INLINE static inline
#define FUNCTION_CONSTANT(type, name, index) extern constant type name
#define CONSTANT_TABLE(type, name, n) static constant type name[n]
#define EXPORT_KERNEL(host, fn, ...) template decltype(fn<__VA_ARGS__>) fn<__VA_ARGS__>
#define DS4_SQRT(x) sqrt(x)

#else  // the host: argument structs only
#include <cstdint>
#endif

#if defined(KERNEL_INLINE)  // for numerics.h
#define DS4_FN KERNEL_INLINE
#define DS4_FMA(a, b, c) fma((a), (b), (c))
#define DS4_FABS(x) fabs(x)
#define DS4_AS_UINT(x) as_type<uint>(float(x))
#define DS4_AS_FLOAT(x) as_type<float>(uint(x))
typedef unsigned int ds4_u32;
typedef int ds4_i32;
typedef unsigned char ds4_u8;
#endif

#endif
