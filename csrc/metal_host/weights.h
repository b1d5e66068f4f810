// Weights as the device sees them: buffers over the pages of the mapped file, and tables of where each expert lies.
#pragma once

#include <memory>
#include <vector>

#include "engine/backend.h"
#include "metal_host/device.h"

namespace ds4::metal {

// The same matrix of all experts of a layer: in one buffer, found by an offset for each expert.
struct ExpertMatrices {
  RowType type = RowType::f32;
  int rows = 0, cols = 0;
  int64_t row_bytes = 0, scale_row_bytes = 0;
  Place data, scale;     // offsets count from here
  Place offsets;         // uint64 [experts][2]: of data, of scales
  bool aligned = false;  // every row of data begins at a multiple of 16 bytes, if row_bytes is one
};

struct ExpertTable {
  ExpertMatrices w1, w2, w3;  // gate, down, up
  std::vector<Ref<MTL::Buffer>> owned;
};

// The table of these experts: made when the weights were adopted, or, for weights that were not (tests of single
// operations), now.
std::shared_ptr<const ExpertTable> expert_table(const MoeWeights& weights);

}  // namespace ds4::metal
