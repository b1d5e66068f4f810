// A back end around another one that counts and times every operation: per operation and layer, how often it was
// dispatched, how many bytes it had to read from weights and caches, and how long it took. Results are unchanged.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "engine/backend.h"
#include "engine/cone.h"
#include "engine/shape.h"
#include "engine/weights.h"

namespace ds4 {

enum class Op : uint8_t {
  embed, hc_read, hc_write, engram, attn_in, attn_query, compress, index_query, select, attend, attn_out, route, moe, head,
  // Not of the back end: a layer stood still for its table rows; the rows were on their way behind other work (these
  // seconds pass beside those of the other rows, and these bytes come from disk).
  engram_wait, engram_io,
  draft_main, draft_window, draft_attend, collapse, markov,  // the drafter's own
  count
};
const char* op_name(Op op);

struct LedgerRow {
  Op op;
  int layer;  // -1: outside the layers
  int64_t dispatches = 0;
  int64_t bytes = 0;
  double seconds = 0.0;  // until it was done, for who waits
  // On a device: what it was given for these dispatches, and how long it worked on them.
  int64_t kernels = 0;
  double device_seconds = 0.0;
};

class Ledger final : public Backend {
 public:
  // `layers` are what the model, or (drafter) the drafter's stages, run; they and `shape` outlive this.
  Ledger(std::unique_ptr<Backend> inner, const Shape& shape, const std::vector<LayerWeights>& layers, bool drafter = false);

  void* alloc(size_t bytes) override { return inner_->alloc(bytes); }
  void* alloc_for_host(size_t bytes) override { return inner_->alloc_for_host(bytes); }
  void free(void* p, size_t bytes) override { inner_->free(p, bytes); }
  void commit(void* p, size_t bytes) override { inner_->commit(p, bytes); }
  const char* name() const override { return inner_->name(); }
  size_t working_bytes() const override { return inner_->working_bytes(); }
  Backend* sibling(const Shape& shape) const override { return inner_->sibling(shape); }
  void wait() override { inner_->wait(); }
  void submit() override { inner_->submit(); }
  bool device_work(DeviceWork* work) const override { return inner_->device_work(work); }
  Latch* latch() override { return nullptr; }  // it waits after every operation, so nobody would be left to open it
  void abandon() noexcept override { inner_->abandon(); }
  void set_poll(Poll* poll) override { inner_->set_poll(poll); }
  void set_class(NumericClass c) override {
    inner_->set_class(c);
    class_ = c;
  }

  void embed(const EmbedArgs&) override;
  void hc_read(const HcReadArgs&) override;
  void hc_write(const HcWriteArgs&) override;
  void engram(const EngramArgs&) override;
  void attn_in(const AttnInArgs&) override;
  void attn_query(const AttnQueryArgs&) override;
  void compress(const CompressArgs&) override;
  void index_query(const IndexQueryArgs&) override;
  void select(const SelectArgs&) override;
  void attend(const AttendArgs&) override;
  void attn_out(const AttnOutArgs&) override;
  void route(const RouteArgs&) override;
  void moe(const MoeArgs&) override;
  void head(const HeadArgs&) override;
  // (Runs of the target call it, so it belongs to no draft; it reads activations only.)
  void stream_mean(const StreamMeanArgs& a) override;
  void draft_main(const DraftMainArgs&) override;
  void draft_window(const DraftWindowArgs&) override;
  void draft_attend(const DraftAttendArgs&) override;
  void collapse(const CollapseArgs&) override;
  void markov(const MarkovArgs&) override;

  // The rows of one request arrived at layer l.
  void add_engram_rows(int l, double waited, double hidden, int64_t disk_bytes);
  // A complete run of these rows that took `seconds` in all.
  void add_run(const std::vector<LayerRows>& rows, bool with_head, double seconds);
  // A draft block of n rows.
  void add_draft(int64_t n, double seconds);
  // Time beside the runs: the rows of a draft.
  void add_seconds(double seconds) { seconds_ += seconds; }
  void clear();

  std::vector<LedgerRow> rows() const;
  int64_t runs() const { return runs_; }
  int64_t tokens() const { return tokens_; }
  int64_t matrix_tokens() const { return matrix_tokens_; }  // of them, in the matrix class
  double seconds() const { return seconds_; }
  int64_t experts_touched() const { return experts_touched_; }  // distinct experts of all moe dispatches
  bool on_device() const { return on_device_; }
  // Operations whose dispatches are not what the runs must have made, and what a device did that belongs to none or whose
  // time it did not tell; empty when the ledger is complete.
  std::vector<std::string> missing() const;

 private:
  template <class F>
  void timed(Op op, int layer, int64_t bytes, F f);
  int layer_of(const void* weights);
  LedgerRow& row(Op op, int layer) { return table_[static_cast<size_t>(layer + 1)][static_cast<size_t>(op)]; }

  void missing_of_device(std::vector<std::string>& out) const;
  void count_run(int64_t n, bool with_head, double seconds);

  std::unique_ptr<Backend> inner_;
  const Shape& shape_;
  const std::vector<LayerWeights>& layers_;
  const bool drafter_;
  std::vector<std::array<LedgerRow, static_cast<size_t>(Op::count)>> table_;  // [1 + layers]
  std::vector<std::array<int64_t, static_cast<size_t>(Op::count)>> expected_;  // [layers] dispatches of the runs
  int layer_ = -1;  // of the operation before
  NumericClass class_ = NumericClass::canonical;
  int64_t runs_ = 0, head_runs_ = 0, tokens_ = 0, matrix_tokens_ = 0, experts_touched_ = 0;
  double seconds_ = 0.0;
  bool on_device_ = false;
  int64_t kernels_before_ = 0;  // that the back end had issued when counting began
  int64_t kernels_beside_ = 0;  // of operations that are not counted
};

}  // namespace ds4
