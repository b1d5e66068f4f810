// embed: the token's row in every stream.
#include "embed.h"

#include "metal_host/products.h"

namespace ds4::metal {

void MetalBackend::embed(const EmbedArgs& a) {  // the first operation of a run
  begin_run(a.n);
  const Matrix& t = *a.table;
  const int64_t c = s_.n_streams, d = s_.hidden;
  const EmbedParams params{static_cast<uint64_t>(t.row_bytes), static_cast<uint32_t>(t.scale_row_bytes), static_cast<uint32_t>(d),
                           static_cast<uint32_t>(c)};
  Constants constants;
  constants.type = static_cast<int32_t>(t.type);
  encode("embed", constants, params,
         {fixed(t.data), fixed(scales(t)), reads(a.tokens, a.n), writes(a.stream, a.n * c * d), writes(a.mix, a.n * c)}, Grid{a.n}, EMBED_THREADS);
}

}  // namespace ds4::metal
