// embed: the token's row in every stream, and the start mix (1, 0, ...).
#include "cpu/backend.h"
#include "cpu/row_ops.h"

namespace ds4::cpu::DS4_ISA {

void CpuBackend::embed(const EmbedArgs& a) {
  const int c = s_.n_streams, d = s_.hidden;
  loop(a.n, [&](int64_t i, int) {
    float* stream = a.stream + i * c * d;
    decode_row(*a.table, a.tokens[i], stream);
    round_row(stream, d, round_);
    for (int j = 1; j < c; ++j)
      for (int k = 0; k < d; ++k) stream[j * d + k] = stream[k];
    for (int j = 0; j < c; ++j) a.mix[i * c + j] = j == 0 ? 1.f : 0.f;
  });
}

}  // namespace ds4::cpu::DS4_ISA
