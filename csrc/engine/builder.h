// Puts a model together from named tensors. Names are the official ones (docs/formats.md); both readers use them.
#pragma once

#include <memory>
#include <string>

#include "engine/drafter.h"
#include "engine/model.h"

namespace ds4 {

// Bytes of one row of a matrix in this format, and of its scales. Throws CheckpointError when cols does not fit the format.
int64_t row_bytes(RowType type, int64_t cols);
int64_t scale_row_bytes(RowType type, int64_t cols);
RowType parse_row_type(const std::string& name);

struct ModelBuilderSlots;

class ModelBuilder {
 public:
  explicit ModelBuilder(Shape shape, Activations activations);

  // The data must outlive the model. n_bytes and n_scale_bytes are checked against the format.
  void matrix(const std::string& name, const std::string& type, int64_t rows, int64_t cols, const uint8_t* data,
              int64_t n_bytes, const uint8_t* scale, int64_t n_scale_bytes);
  void vector(const std::string& name, const float* data, int64_t n);
  void hash(EngramHash hash);
  void engram(std::shared_ptr<Engram> engram);

  // Throws CheckpointError naming every slot that is still empty.
  std::shared_ptr<const Model> build(const std::string& isa, int threads);

 private:
  std::shared_ptr<Model> model_;
  std::shared_ptr<ModelBuilderSlots> slots_;
};

// The same for a drafter: the `mtp.*` tensors, checked against the target's sizes.
class DrafterBuilder {
 public:
  DrafterBuilder(std::shared_ptr<const Model> target, DraftSizes sizes, int n_stages, int n_experts, int top_k);
  void matrix(const std::string& name, const std::string& type, int64_t rows, int64_t cols, const uint8_t* data,
              int64_t n_bytes, const uint8_t* scale, int64_t n_scale_bytes);
  void vector(const std::string& name, const float* data, int64_t n);
  std::shared_ptr<const DrafterModel> build();

 private:
  std::shared_ptr<DrafterModel> model_;
  std::shared_ptr<ModelBuilderSlots> slots_;
};

}  // namespace ds4
