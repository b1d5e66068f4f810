// engram: rows from the table, one projection to keys and a value, gated add to every stream.
#include "cpu/backend.h"
#include "cpu/row_ops.h"
#include "cpu/slices.h"

namespace ds4::cpu::DS4_ISA {

namespace {

// h w key summed as the row product of (h w) with key; w is the rounded product of both norm weights.
float gate_dot(const float* h, const float* qw, const float* kw, const float* key, int d, float* hw) {
  for (int k = 0; k < d; ++k) hw[k] = h[k] * (qw[k] * kw[k]);
  return dot_f32(hw, key, d);
}

}  // namespace

// In slices: what the table gives for a whole chunk, unpacked and projected, would be a gigabyte.
void CpuBackend::engram(const EngramArgs& a) {
  for (int64_t first = 0; first < a.n; first += kSliceRows)
    engram_slice(a, first, static_cast<int>(a.n - first < kSliceRows ? a.n - first : kSliceRows));
}

void CpuBackend::engram_slice(const EngramArgs& a, int64_t first, int n) {
  const int c = s_.n_streams, d = s_.hidden, columns = s_.engram_columns, dim = s_.engram_dim;
  const int width = columns * dim, row_bytes = s_.engram_row_bytes(), kv = (c + 1) * d;
  const uint8_t* rows = a.rows + first * columns * row_bytes;
  float* stream = a.stream + first * c * d;
  float* x = need_temp(static_cast<size_t>(n) * (width + kv));
  float* projected = x + static_cast<size_t>(n) * width;
  loop(n, [&](int64_t i, int) {
    float* xi = x + i * width;
    for (int col = 0; col < columns; ++col)
      unpack_window_row(rows + (i * columns + col) * static_cast<int64_t>(row_bytes), dim, xi + col * dim);
    if (quant_) fake_q8(xi, width);
  });
  linear(a.w->wkv, XRows{x, width, nullptr}, n, projected, kv, round_, true);
  need_scratch(static_cast<size_t>(d));
  const float inv_sqrt_d = 1.0f / DS4_SQRT(static_cast<float>(d));
  loop(n, [&](int64_t i, int worker) {
    float* hw = scratch(worker);
    const float* keys = projected + i * kv;
    const float* value = keys + static_cast<int64_t>(c) * d;
    for (int j = 0; j < c; ++j) {
      float* h = stream + (i * c + j) * d;
      const float* key = keys + static_cast<int64_t>(j) * d;
      const float* qw = a.w->q_weight + static_cast<int64_t>(j) * d;
      const float* kw = a.w->k_weight + static_cast<int64_t>(j) * d;
      float dot = gate_dot(h, qw, kw, key, d, hw);
      dot = dot * inverse_rms(h, d, s_.norm_eps);
      dot = dot * inverse_rms(key, d, s_.norm_eps);
      dot = dot * inv_sqrt_d;
      const float root = DS4_SQRT(ds4_max(DS4_FABS(dot), 1e-6f));
      const float g = ds4_sigmoid(DS4_AS_FLOAT(DS4_AS_UINT(root) | (DS4_AS_UINT(dot) & 0x80000000u)));
      for (int k = 0; k < d; ++k) h[k] = rounded(DS4_FMA(g, value[k], h[k]), round_);
    }
  });
}

}  // namespace ds4::cpu::DS4_ISA
