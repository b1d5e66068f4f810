#include "engine/ledger.h"

#include <chrono>

namespace ds4 {

namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

int64_t expert_bytes(const ExpertWeights& w) { return w.w1.bytes() + w.w2.bytes() + w.w3.bytes(); }

// How often an operation runs in one run of these rows, in layer l.
int64_t expected(const Shape& s, Op op, int l, const LayerRows& r) {
  const int64_t enters = r.stream < r.n ? 1 : 0, whole = r.full < r.n ? 1 : 0;
  switch (op) {
    case Op::hc_read: return enters + whole;
    case Op::hc_write: return 2 * whole;
    case Op::engram:
    case Op::engram_wait:
    case Op::engram_io: return s.engram_index[l] >= 0 ? enters : 0;
    case Op::attn_in: return r.window < r.n ? 1 : 0;
    case Op::compress: return r.entries < r.n ? 1 : 0;
    case Op::index_query:
    case Op::select: return s.index_source[l] == l ? whole : 0;
    case Op::attn_query:
    case Op::attend:
    case Op::attn_out:
    case Op::route:
    case Op::moe: return whole;
    default: return 0;
  }
}

// How often an operation runs in a stage of one draft.
int64_t expected_in_draft(Op op) {
  switch (op) {
    case Op::hc_read:
    case Op::hc_write: return 2;
    case Op::attn_in:
    case Op::attn_query:
    case Op::draft_attend:
    case Op::attn_out:
    case Op::route:
    case Op::moe: return 1;
    default: return 0;
  }
}

}  // namespace

const char* op_name(Op op) {
  static const char* const kNames[] = {"embed",       "hc_read", "hc_write", "engram",   "attn_in", "attn_query", "compress",
                                       "index_query", "select",  "attend",   "attn_out", "route",   "moe",        "head",
                                       "engram_wait", "engram_io",
                                       "draft_main",  "draft_window", "draft_attend", "collapse", "markov"};
  static_assert(sizeof(kNames) / sizeof(kNames[0]) == static_cast<size_t>(Op::count));
  return kNames[static_cast<size_t>(op)];
}

Ledger::Ledger(std::unique_ptr<Backend> inner, const Shape& shape, const std::vector<LayerWeights>& layers, bool drafter)
    : inner_(std::move(inner)), shape_(shape), layers_(layers), drafter_(drafter), table_(layers.size() + 1), expected_(layers.size()) {
  clear();
}

void Ledger::clear() {
  for (size_t l = 0; l < table_.size(); ++l)
    for (size_t o = 0; o < table_[l].size(); ++o) table_[l][o] = LedgerRow{static_cast<Op>(o), static_cast<int>(l) - 1};
  for (auto& layer : expected_) layer.fill(0);
  runs_ = head_runs_ = tokens_ = matrix_tokens_ = experts_touched_ = 0;
  seconds_ = 0.0;
  DeviceWork work;
  on_device_ = inner_->device_work(&work);
  kernels_before_ = work.dispatches;
  kernels_beside_ = 0;
}

void Ledger::add_engram_rows(int l, double waited, double hidden, int64_t disk_bytes) {
  LedgerRow &wait = row(Op::engram_wait, l), &io = row(Op::engram_io, l);
  ++wait.dispatches;
  ++io.dispatches;
  wait.seconds += waited;
  io.seconds += hidden;
  io.bytes += disk_bytes;
}

void Ledger::count_run(int64_t n, bool with_head, double seconds) {
  ++runs_;
  head_runs_ += with_head ? 1 : 0;
  tokens_ += n;
  if (class_ == NumericClass::matrix) matrix_tokens_ += n;
  seconds_ += seconds;
}

void Ledger::add_run(const std::vector<LayerRows>& rows, bool with_head, double seconds) {
  count_run(rows.front().n, with_head, seconds);
  for (size_t l = 0; l < expected_.size(); ++l)
    for (size_t o = 0; o < expected_[l].size(); ++o)
      expected_[l][o] += expected(shape_, static_cast<Op>(o), static_cast<int>(l), rows[l]);
}

void Ledger::add_draft(int64_t n, double seconds) {
  count_run(n, true, seconds);
  for (auto& layer : expected_)
    for (size_t o = 0; o < layer.size(); ++o) layer[o] += expected_in_draft(static_cast<Op>(o));
}

template <class F>
void Ledger::timed(Op op, int layer, int64_t bytes, F f) {
  DeviceWork before, after;
  inner_->device_work(&before);
  const auto start = Clock::now();
  f();
  inner_->wait();  // so that the time is the operation's own, and the next one may look at its result
  LedgerRow& r = row(op, layer);
  r.seconds += since(start);
  if (inner_->device_work(&after)) {
    r.kernels += after.dispatches - before.dispatches;
    r.device_seconds += after.seconds - before.seconds;
  }
  r.bytes += bytes;
  ++r.dispatches;
}

// Weights of a layer lie inside its LayerWeights; operations without weights belong to the layer of the one before.
int Ledger::layer_of(const void* weights) {
  const auto* p = static_cast<const char*>(weights);
  const auto* first = reinterpret_cast<const char*>(layers_.data());
  layer_ = static_cast<int>((p - first) / static_cast<ptrdiff_t>(sizeof(LayerWeights)));
  return layer_;
}

void Ledger::embed(const EmbedArgs& a) {
  layer_ = -1;
  timed(Op::embed, -1, a.n * a.table->row_bytes, [&] { inner_->embed(a); });
}

void Ledger::hc_read(const HcReadArgs& a) {
  const int l = layer_of(a.w);
  timed(Op::hc_read, l, a.w->fn.bytes(), [&] { inner_->hc_read(a); });
}

void Ledger::hc_write(const HcWriteArgs& a) {
  timed(Op::hc_write, layer_, 0, [&] { inner_->hc_write(a); });
}

void Ledger::engram(const EngramArgs& a) {
  const int l = layer_of(a.w);
  timed(Op::engram, l, a.w->wkv.bytes(), [&] { inner_->engram(a); });
}

void Ledger::attn_in(const AttnInArgs& a) {
  const int l = layer_of(a.w);
  timed(Op::attn_in, l, a.w->wq_a.bytes() + a.w->wkv.bytes(), [&] { inner_->attn_in(a); });
}

void Ledger::attn_query(const AttnQueryArgs& a) {
  const int l = layer_of(a.w);
  timed(Op::attn_query, l, a.w->wq_b.bytes(), [&] { inner_->attn_query(a); });
}

void Ledger::compress(const CompressArgs& a) {
  const int l = layer_of(a.w);
  timed(Op::compress, l, a.w->wkv.bytes() + (a.w->wgate.empty() ? 0 : a.w->wgate.bytes()) + a.w->index_k.bytes(),
        [&] { inner_->compress(a); });
}

void Ledger::index_query(const IndexQueryArgs& a) {
  const int l = layer_of(a.w);
  timed(Op::index_query, l, a.w->wq_b.bytes() + a.w->weights_proj.bytes(), [&] { inner_->index_query(a); });
}

void Ledger::select(const SelectArgs& a) {
  // Index rows of the entries that may be scored, for each row of the call.
  const Shape& s = shape_;
  int64_t entries = 0;
  for (int i = 0; i < a.n; ++i) {
    const int64_t visible = (a.position + i + 1) / a.ratio;
    const int64_t admitted =
        a.use_blocks != nullptr ? static_cast<int64_t>(a.n_use_blocks[i]) * s.candidate_block_size : visible;
    entries += admitted < visible ? admitted : visible;
  }
  timed(Op::select, layer_, entries * s.index_row_bytes(), [&] { inner_->select(a); });
}

void Ledger::attend(const AttendArgs& a) {
  const Shape& s = shape_;
  int64_t bytes = 0;
  for (int i = 0; i < a.n; ++i) {
    const int64_t rows = a.position + i + 1 < s.window ? a.position + i + 1 : s.window;
    bytes += rows * s.window_row_bytes();
    if (a.compressed != nullptr) bytes += static_cast<int64_t>(a.n_selected[i]) * s.compressed_row_bytes();
  }
  timed(Op::attend, layer_, bytes, [&] { inner_->attend(a); });
}

void Ledger::attn_out(const AttnOutArgs& a) {
  const int l = layer_of(a.w);
  timed(Op::attn_out, l, a.w->wo_a.bytes() + a.w->wo_b.bytes(), [&] { inner_->attn_out(a); });
}

void Ledger::route(const RouteArgs& a) {
  const int l = layer_of(a.w);
  timed(Op::route, l, a.w->gate.bytes(), [&] { inner_->route(a); });
}

void Ledger::moe(const MoeArgs& a) {
  const int l = layer_of(a.w);
  std::vector<bool> used(a.w->experts.size(), false);
  int64_t bytes = expert_bytes(a.w->shared);
  for (int64_t p = 0; p < static_cast<int64_t>(a.n) * shape_.top_k; ++p) {
    const auto e = static_cast<size_t>(a.experts[p]);
    if (used[e]) continue;
    used[e] = true;
    ++experts_touched_;
    bytes += expert_bytes(a.w->experts[e]);
  }
  timed(Op::moe, l, bytes, [&] { inner_->moe(a); });
}

void Ledger::head(const HeadArgs& a) {
  layer_ = -1;
  timed(Op::head, -1, a.head->bytes(), [&] { inner_->head(a); });
}

void Ledger::stream_mean(const StreamMeanArgs& a) {
  DeviceWork before, after;
  if (!inner_->device_work(&before)) return inner_->stream_mean(a);
  inner_->stream_mean(a);
  inner_->wait();  // or its time would be the next operation's
  inner_->device_work(&after);
  kernels_beside_ += after.dispatches - before.dispatches;
}

void Ledger::draft_main(const DraftMainArgs& a) {
  timed(Op::draft_main, -1, a.w->bytes(), [&] { inner_->draft_main(a); });
}

void Ledger::draft_window(const DraftWindowArgs& a) {
  const int l = layer_of(a.w);
  timed(Op::draft_window, l, a.w->wkv.bytes(), [&] { inner_->draft_window(a); });
}

void Ledger::draft_attend(const DraftAttendArgs& a) {
  const int64_t rows = a.position - a.first + a.n;
  timed(Op::draft_attend, layer_, rows * shape_.window_row_bytes(), [&] { inner_->draft_attend(a); });
}

void Ledger::collapse(const CollapseArgs& a) {
  timed(Op::collapse, -1, 0, [&] { inner_->collapse(a); });
}

void Ledger::markov(const MarkovArgs& a) {
  const int64_t sure = a.confidence_out != nullptr ? a.confidence->bytes() : 0;
  timed(Op::markov, -1, a.head->bytes() + a.embed->row_bytes + sure, [&] { inner_->markov(a); });
}

std::vector<LedgerRow> Ledger::rows() const {
  std::vector<LedgerRow> out;
  for (const auto& layer : table_)
    for (const LedgerRow& r : layer)
      if (r.dispatches > 0) out.push_back(r);
  return out;
}

// Every dispatch of the device belongs to an operation, and every operation that it worked on took time.
void Ledger::missing_of_device(std::vector<std::string>& out) const {
  DeviceWork now;
  if (!inner_->device_work(&now)) return;
  int64_t counted = kernels_beside_;
  for (const auto& layer : table_)
    for (const LedgerRow& r : layer) {
      counted += r.kernels;
      if (r.kernels > 0 && !(r.device_seconds > 0.0))
        out.push_back(std::string(op_name(r.op)) + " in layer " + std::to_string(r.layer) + ": the device told no time");
    }
  if (counted != now.dispatches - kernels_before_)
    out.push_back("the device made " + std::to_string(now.dispatches - kernels_before_) + " dispatches, of which " +
                  std::to_string(counted) + " belong to an operation");
}

std::vector<std::string> Ledger::missing() const {
  std::vector<std::string> out;
  const auto check = [&](const LedgerRow& r, int64_t want) {
    if (r.dispatches != want)
      out.push_back(std::string(op_name(r.op)) + " in layer " + std::to_string(r.layer) + ": " + std::to_string(want) +
                    " dispatches expected, " + std::to_string(r.dispatches) + " seen");
  };
  check(table_[0][static_cast<size_t>(Op::embed)], runs_);
  check(table_[0][static_cast<size_t>(Op::head)], head_runs_);
  check(table_[0][static_cast<size_t>(Op::collapse)], drafter_ ? runs_ : 0);
  // Rows are put into a drafter's windows as often as there are any, into every stage's, after their common part.
  const int64_t mains = table_[0][static_cast<size_t>(Op::draft_main)].dispatches;
  for (size_t l = 0; l < layers_.size(); ++l)
    for (size_t o = 0; o < static_cast<size_t>(Op::count); ++o)
      check(table_[l + 1][o], static_cast<Op>(o) == Op::draft_window ? mains : expected_[l][o]);
  missing_of_device(out);
  return out;
}

}  // namespace ds4
