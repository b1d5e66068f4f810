// Which rows of which layers must be computed: the dependency cone of what is aim. Pure functions of positions.
//
// A row of a layer reads its own stream, the window rows of its layer up to window - 1 positions back, and compressed
// rows. So what is wanted of the last tokens reaches window - 1 positions further back with every layer, down to the
// last layer that makes compressed rows: that one, and all below it, are needed for every token.
// docs/decisions/0005-the-decoder-computes-its-cone.md.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/shape.h"

namespace ds4 {

// What is wanted when the caches hold the first `position` tokens, and there are or will be `end` of them.
struct Aim {
  int64_t position = 0;
  int64_t end = 0;
  int64_t logits_from = 0;   // first position whose stream behind the last layer is wanted; `end`: none
  int64_t window_from = 0;   // first position whose window rows are wanted, in every layer
  int64_t entries_from = 0;  // first position whose compressed rows and unpooled rows are wanted
};

// The rows to compute, by position, up to Aim::end. Streams of a layer are computed for a run of last positions
// that gets shorter from layer to layer.
struct Cone {
  std::vector<int64_t> stream;  // [n_layers + 1] first stream that enters layer l (the last: the head)
  std::vector<int64_t> window;  // [n_layers] first window row; from stream[l + 1] on the whole layer is computed
  std::vector<char> kept;       // [n_layers] are all window rows in front of `position` that are needed there already?
  int64_t entries = 0;          // first compressed row of every source
  int64_t start() const { return stream.front(); }
};

// low[l]: window rows low[l] .. position - 1 of layer l are in the caches. A cone that starts in front of `position`
// needs tokens to be run again.
Cone cone_of(const Shape& shape, const Aim& aim, const std::vector<int64_t>& low);

// Cuts off what cannot be computed without running tokens in front of `position` again. What cone_of() gave for less
// without such tokens stays whole.
void cut_at(const Shape& shape, int64_t position, const std::vector<int64_t>& low, Cone* cone);

// The part of a cone that lies in a run of n tokens from `position` on: first row of the run, n where there is none.
struct LayerRows {
  int n = 0;
  int stream = 0, window = 0, full = 0, entries = 0;  // entries: n in layers that make none
};
std::vector<LayerRows> rows_of(const Shape& shape, const Cone& cone, int64_t position, int n);

// The encoder: layers whose window rows are needed to go on with a long prefill. Those in front of the last source.
inline int encoder_layers(const Shape& shape) { return shape.source_layer.empty() ? 0 : shape.source_layer.back(); }

}  // namespace ds4
