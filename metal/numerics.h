// The arithmetic that every back end shares: one text for C++, Metal and CUDA.
//
// Everything here is scalar, branch-light and written with the few operations that IEEE 754 rounds
// correctly on every machine (+ - * / sqrt fma, integer bit work), so the same input gives the same
// bits everywhere. No libm, no fast-math, no contraction (the build passes -ffp-contract=off).
// f32 subnormals are flushed by the environment (FTZ/DAZ), see docs/numerics.md.
//
// The including side defines nothing for C++; Metal and CUDA set DS4_FN and the DS4_* primitives in their compat header.
#ifndef DS4_NUMERICS_H
#define DS4_NUMERICS_H

#ifndef DS4_FN
#include <cstdint>
#define DS4_FN static inline
#define DS4_FMA(a, b, c) __builtin_fmaf((a), (b), (c))
#define DS4_SQRT(x) __builtin_sqrtf(x)
#define DS4_FABS(x) __builtin_fabsf(x)
#define DS4_AS_UINT(x) __builtin_bit_cast(uint32_t, static_cast<float>(x))
#define DS4_AS_FLOAT(x) __builtin_bit_cast(float, static_cast<uint32_t>(x))
typedef uint32_t ds4_u32;
typedef int32_t ds4_i32;
typedef uint8_t ds4_u8;
#endif

// ---------------------------------------------------------------- small helpers

DS4_FN float ds4_max(float a, float b) { return a > b ? a : b; }
DS4_FN float ds4_min(float a, float b) { return a < b ? a : b; }

// 2^e for -126 <= e <= 127; smaller gives 0 (flushed), larger gives infinity.
DS4_FN float ds4_exp2i(ds4_i32 e) {
  ds4_i32 biased = e + 127;
  biased = biased < 0 ? 0 : biased;
  biased = biased > 255 ? 255 : biased;
  return DS4_AS_FLOAT((ds4_u32)biased << 23);
}

// Round to nearest even to bfloat16, kept as float. NaN stays NaN (quiet), infinities stay.
DS4_FN float ds4_bf16(float x) {
  ds4_u32 u = DS4_AS_UINT(x);
  ds4_u32 r = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
  ds4_u32 nan = (u & 0xffff0000u) | 0x00400000u;
  return DS4_AS_FLOAT((u & 0x7fffffffu) > 0x7f800000u ? nan : r);
}

// 1 / sqrt(x), two correctly rounded steps (hardware reciprocal estimates differ between machines).
DS4_FN float ds4_rsqrt(float x) { return 1.0f / DS4_SQRT(x); }

// ---------------------------------------------------------------- exp, log, sigmoid, softplus, silu

// exp(x), about 1 ulp. x = n ln2 + r, |r| <= ln2/2; degree-7 Taylor-minimax polynomial; exp(0) is exactly 1.
// Below -87.33 the result would be subnormal: 0. Above 88.72: infinity. NaN gives NaN.
DS4_FN float ds4_exp(float x) {
  float xc = ds4_min(ds4_max(x, -104.0f), 89.0f);
  float t = DS4_FMA(xc, 1.44269504088896341f, 12582912.0f);  // 1.5 * 2^23: rounds to the nearest integer
  float n = t - 12582912.0f;
  float r = DS4_FMA(n, -0.693145751953125f, xc);
  r = DS4_FMA(n, -1.42860682030941723212e-6f, r);
  float p = 1.98412698412698413e-4f;
  p = DS4_FMA(p, r, 1.38888888888888889e-3f);
  p = DS4_FMA(p, r, 8.33333333333333333e-3f);
  p = DS4_FMA(p, r, 4.16666666666666667e-2f);
  p = DS4_FMA(p, r, 1.66666666666666667e-1f);
  p = DS4_FMA(p, r, 0.5f);
  p = DS4_FMA(p, r, 1.0f);
  p = DS4_FMA(p, r, 1.0f);
  ds4_i32 e = (ds4_i32)DS4_AS_UINT(t) - 0x4b400000;
  ds4_i32 half_e = e >> 1;  // two factors, so that neither overflows while the product does not
  float y = (p * ds4_exp2i(half_e)) * ds4_exp2i(e - half_e);
  y = x < -87.33654f ? 0.0f : y;
  y = x > 88.72283f ? DS4_AS_FLOAT(0x7f800000u) : y;
  return x != x ? x : y;
}

// log(x) for normal positive x, about 1 ulp: x = 2^e m, m in [sqrt(1/2), sqrt(2)), log m = 2 atanh((m-1)/(m+1)).
// log(0) = -infinity; negative gives NaN; infinity stays.
DS4_FN float ds4_log(float x) {
  ds4_u32 u = DS4_AS_UINT(x);
  ds4_i32 e = (ds4_i32)((u - 0x3f3504f3u) >> 23);
  e = (e & 0x100) != 0 ? e - 512 : e;  // sign extension of the 9-bit difference
  float m = DS4_AS_FLOAT(u - ((ds4_u32)e << 23));
  float f = m - 1.0f;
  float s = f / (2.0f + f);
  float z = s * s;
  float p = 0.15384615384615385f;
  p = DS4_FMA(p, z, 0.18181818181818182f);
  p = DS4_FMA(p, z, 0.22222222222222222f);
  p = DS4_FMA(p, z, 0.28571428571428571f);
  p = DS4_FMA(p, z, 0.4f);
  p = DS4_FMA(p, z, 0.66666666666666667f);
  float r = s * (p * z);              // 2 atanh(s) - 2 s
  float hfsq = 0.5f * f * f;          // log m = f - (hfsq - s (hfsq + R)), the usual split that keeps f exact
  float big = (float)e;
  float low = DS4_FMA(big, 9.05800061445916e-6f, s * hfsq + r);
  float y = DS4_FMA(big, 0.693138122558593750f, f - (hfsq - low));
  y = x == 0.0f ? DS4_AS_FLOAT(0xff800000u) : y;
  y = u == 0x7f800000u ? x : y;
  return (x < 0.0f || x != x) ? DS4_AS_FLOAT(0x7fc00000u) : y;
}

// log(1 + t) for t in [0, 1]: log of the rounded sum plus the first-order rest of its rounding.
DS4_FN float ds4_log1p01(float t) {
  float u = 1.0f + t;
  float rest = t - (u - 1.0f);
  return ds4_log(u) + rest / u;
}

// 1 / (1 + exp(-x)), from the side that does not overflow.
DS4_FN float ds4_sigmoid(float x) {
  float e = ds4_exp(-DS4_FABS(x));
  float d = 1.0f + e;
  float s = 1.0f / d;
  float r = x < 0.0f ? e * s : s;
  return x != x ? x : r;
}

// log(1 + exp(x)); x itself above 20, as the reference.
DS4_FN float ds4_softplus(float x) {
  float y = ds4_max(x, 0.0f) + ds4_log1p01(ds4_exp(-DS4_FABS(x)));
  y = x > 20.0f ? x : y;
  return x != x ? x : y;
}

DS4_FN float ds4_silu(float x) { return x * ds4_sigmoid(x); }

// ---------------------------------------------------------------- number formats

// Smallest power of two >= v, for normal positive v.
DS4_FN float ds4_ceil2(float v) {
  ds4_u32 u = DS4_AS_UINT(v);
  return DS4_AS_FLOAT(((u + 0x007fffffu) & 0x7f800000u));
}

// e8m0 byte of a power of two.
DS4_FN ds4_u8 ds4_e8m0_code(float power) { return (ds4_u8)(DS4_AS_UINT(power) >> 23); }

// e8m0 byte to float: 2^(b-127); 0 is flushed to 0; 255 is NaN in the format and infinity here (readers refuse it).
DS4_FN float ds4_e8m0(ds4_u32 b) { return DS4_AS_FLOAT(b << 23); }

// e4m3 code to float (largest 448; the NaN codes 0x7f/0xff read as +-480, readers refuse them).
// A normal code is a float with the exponent moved by 120; codes below 8 are the format's own subnormals.
DS4_FN float ds4_e4m3(ds4_u32 code) {
  ds4_u32 sign = (code & 0x80u) << 24;
  ds4_u32 mag = code & 0x7fu;
  float normal = DS4_AS_FLOAT((mag << 20) + (120u << 23));
  float small = (float)(ds4_i32)mag * 0.001953125f;  // 2^-9
  float v = mag < 8u ? small : normal;
  return DS4_AS_FLOAT(DS4_AS_UINT(v) | sign);
}

// Nearest e4m3 value of y (ties to even, saturating at 448), kept as float; the sign of zero is kept, NaN stays NaN.
DS4_FN float ds4_to_e4m3(float y) {
  ds4_u32 u = DS4_AS_UINT(y);
  ds4_u32 sign = u & 0x80000000u;
  float a = ds4_min(DS4_FABS(y), 448.0f);
  ds4_u32 m = DS4_AS_UINT(a);
  float normal = DS4_AS_FLOAT((m + 0x7ffffu + ((m >> 20) & 1u)) & 0xfff00000u);
  float small = (a + 16384.0f) - 16384.0f;  // 1 ulp at 2^14 is 2^-9, the step below 2^-6
  float r = a < 0.015625f ? small : normal;
  return DS4_AS_FLOAT(y != y ? 0x7fc00000u : DS4_AS_UINT(r) | sign);
}

// Code byte of a float that is an e4m3 value.
DS4_FN ds4_u8 ds4_e4m3_code(float v) {
  ds4_u32 u = DS4_AS_UINT(v);
  float a = DS4_FABS(v);
  ds4_u32 normal = ((u & 0x7fffffffu) >> 20) - (120u << 3);
  ds4_u32 small = (ds4_u32)(ds4_i32)(a * 512.0f);
  return (ds4_u8)((a < 0.015625f ? small : normal) | ((u >> 24) & 0x80u));
}

// Twice the value of an e2m1 code: 0 1 2 3 4 6 8 12 and their negatives (integers, for exact dot products).
DS4_FN ds4_i32 ds4_e2m1_twice(ds4_u32 code) {
  ds4_u32 m = code & 7u;
  ds4_i32 v = m < 4u ? (ds4_i32)m : (ds4_i32)((4u + ((m & 1u) << 1)) << ((m >> 1) - 2u));
  return (code & 8u) != 0u ? -v : v;
}

// Nearest e2m1 code of y (ties to the even code, saturating at 6), bit 3 the sign. NaN, whose sign is the machine's own, gives 0.
DS4_FN ds4_u32 ds4_e2m1_code(float y) {
  float a = DS4_FABS(y);
  ds4_u32 c = (a > 0.25f ? 1u : 0u) + (a >= 0.75f ? 1u : 0u) + (a > 1.25f ? 1u : 0u) + (a >= 1.75f ? 1u : 0u) +
              (a > 2.5f ? 1u : 0u) + (a >= 3.5f ? 1u : 0u) + (a > 5.0f ? 1u : 0u);
  return c | (y != y ? 0u : (DS4_AS_UINT(y) >> 28) & 8u);
}

// The scales of the three fake quantisers (docs/numerics.md, formats), from the largest magnitude of a group.
DS4_FN float ds4_scale_q8(float amax) { return ds4_ceil2(ds4_max(amax, 1e-4f) * (1.0f / 448.0f)); }
DS4_FN float ds4_scale_q4_index(float amax) {
  return ds4_ceil2(ds4_max(amax, 7.052966104933725e-38f) * (1.0f / 6.0f));  // floor 6 * 2^-126
}
DS4_FN float ds4_scale_q4_kv(float amax) {
  return ds4_to_e4m3(ds4_max(amax, 0.01171875f) / 6.0f);  // floor 6 * 2^-9
}

// ---------------------------------------------------------------- order

// Order-preserving key of a score: larger score, larger key; -0 counts as 0; NaN is below everything.
DS4_FN ds4_u32 ds4_order_key(float score) {
  float s = score + 0.0f;
  ds4_u32 u = DS4_AS_UINT(s);
  ds4_u32 key = (u & 0x80000000u) != 0u ? ~u : (u | 0x80000000u);
  return score != score ? 0u : key;
}

#endif
