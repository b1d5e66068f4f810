// head: final collapse and norm, then the vocabulary.
#include "cpu/backend.h"
#include "cpu/hc_row.h"
#include "cpu/row_ops.h"

namespace ds4::cpu::DS4_ISA {

void CpuBackend::head(const HeadArgs& a) {
  const int c = s_.n_streams, d = s_.hidden;
  need_scratch(static_cast<size_t>(d));
  loop(a.n, [&](int64_t i, int worker) {
    float* flat = scratch(worker);
    collapse_row(a.stream + i * c * d, a.mix + i * c, c, d, round_, flat);
    norm_row(flat, a.norm, d, s_.norm_eps, round_, a.x + i * d);
  });
  linear(*a.head, XRows{a.x, d, nullptr}, a.n, a.logits, s_.vocab, false);
}

}  // namespace ds4::cpu::DS4_ISA
