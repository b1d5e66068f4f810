// matrix: products of the second numeric class. Compiled once for each instruction set, where fused multiply-adds emulate
// it, and once more with AVX-512-BF16 (DS4_MATRIX_NATIVE), whose VDPBF16PS the class is defined by.
#include "cpu/matrix.h"

#include "cpu/decoders.h"
#ifdef DS4_MATRIX_NATIVE
#include "cpu/matrix_blocks.h"
#endif

DS4_CPU_NAMESPACE_BEGIN

constexpr int kPairLanes = 16;  // accumulators of a product

// bfloat16 as VCVTNE2PS2BF16 makes it: to nearest even, subnormals to zero.
inline float to_bf16(float v) {
  const uint32_t u = DS4_AS_UINT(v);
  if ((u & 0x7f800000u) == 0) return DS4_AS_FLOAT(u & 0x80000000u);
  if ((u & 0x7fffffffu) > 0x7f800000u) return DS4_AS_FLOAT((u | 0x00400000u) & 0xffff0000u);
  return DS4_AS_FLOAT((u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u);
}

// What VDPBF16PS does to one accumulator: the pair's second product first, each with one rounding.
inline float add_pair(float acc, float w0, float w1, float x0, float x1) {
  return DS4_FMA(w0, x0, DS4_FMA(w1, x1, acc));
}

// The tree over the accumulators, neighbours first.
inline float tree16(float* t) {
  for (int s = 1; s < kPairLanes; s <<= 1)
    for (int i = 0; i < kPairLanes; i += 2 * s) t[i] = t[i] + t[i + s];
  return t[0];
}

// The class by plain fused multiply-adds.
float product_of(const float* w, const float* x, int k) {
  float acc[kPairLanes] = {};
  const int wide = (k + 2 * kPairLanes - 1) / (2 * kPairLanes) * 2 * kPairLanes;  // what is missing counts as zeros
  for (int i = 0; i < wide; i += 2) {
    float& a = acc[(i >> 1) & (kPairLanes - 1)];
    a = add_pair(a, i < k ? w[i] : 0.f, i + 1 < k ? w[i + 1] : 0.f, i < k ? to_bf16(x[i]) : 0.f, i + 1 < k ? to_bf16(x[i + 1]) : 0.f);
  }
  return tree16(acc);
}

size_t emulated_scratch(int k) { return static_cast<size_t>(k); }

void emulated_block(const Matrix& m, int r0, int nr, MatrixRows x, int n, float* out, int64_t ldo, float* scratch) {
  const int k = m.cols;
  for (int r = 0; r < nr; ++r) {
    with_decoder(m, [&](auto make) {
      const auto w = make(r0 + r);
      int i = 0;
      for (; i + kW <= k; i += kW) v_store(scratch + i, w.get(i));
      for (; i < k; ++i) scratch[i] = w.at(i);
    });
    for (int i = 0; i < k; ++i) scratch[i] = to_bf16(scratch[i]);
    for (int i = 0; i < n; ++i) out[i * ldo + r] = product_of(scratch, x.row(i), k);
  }
}

#ifdef DS4_MATRIX_NATIVE

// Random bit patterns of every kind, and moderate ones whose sums round.
bool instruction_agrees() {
  uint64_t s = 0x9e3779b97f4a7c15ull;
  const auto next = [&s] {
    s ^= s << 13;
    s ^= s >> 7;
    s ^= s << 17;
    return s;
  };
  for (int round = 0; round < 512; ++round) {
    alignas(64) uint32_t w[kPairLanes], x[kPairLanes], acc[kPairLanes], got[kPairLanes];
    const bool moderate = round % 2 != 0;
    for (int i = 0; i < kPairLanes; ++i) {
      w[i] = static_cast<uint32_t>(next() >> 16);
      x[i] = static_cast<uint32_t>(next() >> 16);
      acc[i] = static_cast<uint32_t>(next() >> 16);
      if (!moderate) continue;
      w[i] = (w[i] & 0x83ff83ffu) | 0x3c003c00u;
      x[i] = (x[i] & 0x83ff83ffu) | 0x3c003c00u;
      acc[i] = (acc[i] & 0x83ffffffu) | 0x3c000000u;
    }
    _mm512_store_si512(got, _mm512_castps_si512(dp_pairs(_mm512_load_ps(acc), _mm512_load_si512(w), _mm512_load_si512(x))));
    const auto flushed = [](uint32_t u) { return DS4_AS_FLOAT((u & 0x7f800000u) == 0 ? u & 0x80000000u : u); };
    for (int i = 0; i < kPairLanes; ++i) {
      const float want = add_pair(flushed(acc[i]), flushed(w[i] << 16), flushed(w[i] & 0xffff0000u), flushed(x[i] << 16),
                                  flushed(x[i] & 0xffff0000u));
      const bool nan = (got[i] & 0x7fffffffu) > 0x7f800000u;
      if (want != want ? !nan : got[i] != DS4_AS_UINT(want)) return false;
    }
  }
  return true;
}

float instruction_chain(int64_t rounds) { return dp_chain(rounds); }
int64_t instruction_flops(int64_t rounds) { return rounds * kChainLength * kPairLanes * 4; }

#endif

DS4_CPU_NAMESPACE_END

namespace ds4::cpu::DS4_ISA {

const MatrixClass* matrix_class();
const MatrixClass* matrix_class() {
#ifdef DS4_MATRIX_NATIVE
  static const MatrixClass table{true, kMatrixBatch, matrix_scratch, matrix_block, instruction_agrees, instruction_chain, instruction_flops};
#else
  static const MatrixClass table{false, 64, emulated_scratch, emulated_block, [] { return true; }, nullptr, nullptr};
#endif
  return &table;
}

}  // namespace ds4::cpu::DS4_ISA
