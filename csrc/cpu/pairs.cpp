// Built with AVX-512-BF16 and AVX-512-VBMI; dispatch.cpp asks the processor for both.
#include "cpu/pairs.h"

#include "cpu/pair_decoders.h"

DS4_CPU_NAMESPACE_BEGIN

// Rows of activations as pairs, [k / 128][vector][row][16]. False where one is not a bfloat16 number.
template <int kLayout>
bool pack_pairs(XRows x, int n, int k, float* out) {
  __m512i rest = _mm512_setzero_si512();
  for (int r = 0; r < n; ++r) {
    const float* row = x.row(r);
    for (int i = 0; i < k; i += 2 * kLanes) {
      V v[2][kGroups];
      for (int h = 0; h < 2; ++h)
        for (int g = 0; g < kGroups; ++g) {
          v[h][g] = v_load(row + i + h * kLanes + g * kW);
          rest = _mm512_or_si512(rest, _mm512_castps_si512(v[h][g].v));
        }
      if constexpr (kLayout == 2)
        for (int h = 0; h < 2; ++h) spread<2>(v[h]), spread<2>(v[h] + 2);
      for (int g = 0; g < kGroups; ++g) {
        const __m512i lower = _mm512_srli_epi32(_mm512_castps_si512(v[1][g].v), 16);
        const __m512i upper = _mm512_castps_si512(v[0][g].v);
        const V pairs = pairs_of(_mm512_mask_blend_epi16(0xaaaaaaaau, lower, upper));
        v_store(out + static_cast<int64_t>(i) / 2 * n + (g * n + r) * kW, pairs);
      }
    }
  }
  return _mm512_test_epi32_mask(rest, _mm512_set1_epi32(0xffff)) == 0;
}

template <class Dec>
bool pair_tiles(const Matrix& m, int r0, int nr, XRows x, int n, float* out, int64_t ldo, float* scratch) {
  if (!pack_pairs<Dec::kLayout>(x, n, m.cols, scratch)) return false;
  switch (n) {
    case 1: return tiles_of<1, Dec>(m, r0, nr, scratch, nullptr, out, ldo), true;
    case 2: return tiles_of<2, Dec>(m, r0, nr, scratch, nullptr, out, ldo), true;
    case 3: return tiles_of<3, Dec>(m, r0, nr, scratch, nullptr, out, ldo), true;
    case 4: return tiles_of<4, Dec>(m, r0, nr, scratch, nullptr, out, ldo), true;
    case 5: return tiles_of<5, Dec>(m, r0, nr, scratch, nullptr, out, ldo), true;
    case 6: return tiles_of<6, Dec>(m, r0, nr, scratch, nullptr, out, ldo), true;
    case 7: return tiles_of<7, Dec>(m, r0, nr, scratch, nullptr, out, ldo), true;
    case 8: return tiles_of<8, Dec>(m, r0, nr, scratch, nullptr, out, ldo), true;
    default: return false;
  }
}

DS4_CPU_NAMESPACE_END

namespace ds4::cpu::DS4_ISA {

bool pair_block(const Matrix& m, int r0, int nr, MatrixRows x, int n, float* out, int64_t ldo, float* scratch);
bool pair_block(const Matrix& m, int r0, int nr, MatrixRows x, int n, float* out, int64_t ldo, float* scratch) {
  if (m.cols % kChunk != 0) return false;
  const XRows rows{x.base, x.stride, x.index};
  switch (m.type) {
    case RowType::bf16: return pair_tiles<PairBf16>(m, r0, nr, rows, n, out, ldo, scratch);
    case RowType::mxfp4: return pair_tiles<PairMxfp4>(m, r0, nr, rows, n, out, ldo, scratch);
    case RowType::fp4_row: return pair_tiles<PairFp4Row>(m, r0, nr, rows, n, out, ldo, scratch);
    default: return false;
  }
}

}  // namespace ds4::cpu::DS4_ISA
