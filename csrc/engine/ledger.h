// A back end around another one that counts and times every operation: per operation and layer, how often it was
// dispatched, how many bytes it had to read from weights and caches, and how long it took. Results are unchanged.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "engine/model.h"

namespace ds4 {

enum class Op : uint8_t {
  embed, hc_read, hc_write, engram, attn_in, attn_query, compress, index_query, select, attend, attn_out, route, moe, head,
  count
};
const char* op_name(Op op);

struct LedgerRow {
  Op op;
  int layer;  // -1: outside the layers
  int64_t dispatches = 0;
  int64_t bytes = 0;
  double seconds = 0.0;
};

class Ledger final : public Backend {
 public:
  Ledger(std::unique_ptr<Backend> inner, const Model& model);

  void* alloc(size_t bytes) override { return inner_->alloc(bytes); }
  void free(void* p, size_t bytes) override { inner_->free(p, bytes); }
  const char* name() const override { return inner_->name(); }
  Backend* sibling(const Shape& shape) const override { return inner_->sibling(shape); }
  void wait() override { inner_->wait(); }
  void submit() override { inner_->submit(); }
  void abandon() noexcept override { inner_->abandon(); }
  void set_poll(Poll* poll) override { inner_->set_poll(poll); }

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
  // The drafter has a back end of its own; what passes here all the same is not counted.
  void stream_mean(const StreamMeanArgs& a) override { inner_->stream_mean(a); }
  void draft_main(const DraftMainArgs& a) override { inner_->draft_main(a); }
  void draft_window(const DraftWindowArgs& a) override { inner_->draft_window(a); }
  void draft_attend(const DraftAttendArgs& a) override { inner_->draft_attend(a); }
  void collapse(const CollapseArgs& a) override { inner_->collapse(a); }
  void markov(const MarkovArgs& a) override { inner_->markov(a); }

  // A complete run of n tokens that took `seconds` in all.
  void add_run(int64_t n, bool with_head, double seconds);
  void clear();

  std::vector<LedgerRow> rows() const;
  int64_t runs() const { return runs_; }
  int64_t tokens() const { return tokens_; }
  double seconds() const { return seconds_; }
  int64_t experts_touched() const { return experts_touched_; }  // distinct experts of all moe dispatches
  // Operations whose dispatches are not what the runs must have made; empty when the ledger is complete.
  std::vector<std::string> missing() const;

 private:
  template <class F>
  void timed(Op op, int layer, int64_t bytes, F f);
  int layer_of(const void* weights);
  LedgerRow& row(Op op, int layer) { return table_[static_cast<size_t>(layer + 1)][static_cast<size_t>(op)]; }

  std::unique_ptr<Backend> inner_;
  const Model& model_;
  std::vector<std::array<LedgerRow, static_cast<size_t>(Op::count)>> table_;  // [1 + layers]
  int layer_ = -1;  // of the operation before
  int64_t runs_ = 0, head_runs_ = 0, tokens_ = 0, experts_touched_ = 0;
  double seconds_ = 0.0;
};

}  // namespace ds4
