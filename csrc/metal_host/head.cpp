// head: final collapse and norm, then the vocabulary.
#include "head.h"

#include "metal_host/products.h"

namespace ds4::metal {

void MetalBackend::head(const HeadArgs& a) {
  const int64_t c = s_.n_streams, d = s_.hidden;
  const HeadParams params{static_cast<uint32_t>(c), static_cast<uint32_t>(d), s_.norm_eps};
  encode("head_norm", {}, params, {reads(a.stream, a.n * c * d), reads(a.mix, a.n * c), fixed(a.norm), writes(a.x, a.n * d)}, Grid{a.n}, HEAD_THREADS,
         norm_bytes(static_cast<int>(d)));
  linear(*a.head, a.x, d, a.n, a.logits, s_.vocab, false);
}

}  // namespace ds4::metal
