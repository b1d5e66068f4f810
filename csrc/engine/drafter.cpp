#include "engine/drafter.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <cstring>

#include "base/error.h"
#include "engine/rope.h"
#include "kv/xxh64.h"

namespace ds4 {

namespace {

// The back end asks `poll` while this lives, and nobody afterwards: the caller's poll may be gone then.
class Polled {
 public:
  Polled(Backend& backend, Poll* poll) : backend_(backend) { backend_.set_poll(poll); }
  ~Polled() { backend_.set_poll(nullptr); }
  Polled(const Polled&) = delete;
  Polled& operator=(const Polled&) = delete;

 private:
  Backend& backend_;
};

double since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

size_t aligned(size_t bytes) { return (bytes + 255) & ~size_t{255}; }

}  // namespace

uint64_t DrafterModel::rows_id() const {
  Xxh64 sum;
  const auto number = [&](uint64_t v) { sum.add(&v, sizeof v); };
  const auto sample = [&](const Matrix& m) {
    number(static_cast<uint64_t>(m.type));
    number(static_cast<uint64_t>(m.bytes()));
    sum.add(m.data, static_cast<size_t>(m.row_bytes));
  };
  for (const int l : sizes.target_layers) number(static_cast<uint64_t>(l));
  sample(weights.main_proj);
  sum.add(weights.main_norm, static_cast<size_t>(shape.hidden) * sizeof(float));
  for (const LayerWeights& stage : weights.stages) {
    sample(stage.attn.wkv);
    sum.add(stage.attn.kv_norm, static_cast<size_t>(shape.head_dim) * sizeof(float));
  }
  return sum.value();
}

Drafter::Sizes Drafter::sizes_of(const DrafterModel& model) {
  const Shape& s = model.shape;
  const int block = model.sizes.block;
  Sizes z;
  z.capacity = s.window + kDraftSlack;
  const int64_t angles = kBatch * (s.rope_dim / 2);
  const int64_t block_angles = int64_t{block} * (s.rope_dim / 2);
  const int64_t bytes[10] = {z.capacity * model.main_dim() * 4, kBatch * s.hidden * 4,
                            static_cast<int64_t>(block) * s.window_row_bytes(), static_cast<int64_t>(block) * s.hidden * 4,
                            angles * 4, angles * 4, block_angles * 4, block_angles * 4, 2 * 4, int64_t{s.vocab} * 4};
  for (int i = 0; i < 10; ++i) z.total += z.parts[i] = aligned(static_cast<size_t>(bytes[i]));
  z.scratch = lay_out(s, model.target->activations, block, block, nullptr, nullptr, nullptr).total();
  z.total += z.scratch;
  return z;
}

size_t Drafter::bytes(const DrafterModel& model) { return sizes_of(model).total; }

Drafter::Drafter(std::shared_ptr<const DrafterModel> model, State& state, const Backend& backend, Faults& faults)
    : model_(std::move(model)), state_(state), faults_(faults), backend_(backend.sibling(model_->shape)) {
  const Sizes z = sizes_of(*model_);
  capacity_ = z.capacity;
  own_bytes_ = z.total;
  own_base_ = static_cast<uint8_t*>(backend_->alloc(own_bytes_));
  backend_->commit(own_base_, own_bytes_);  // or every token of a text would pay for the page of its captured row
  uint8_t* at = own_base_;
  size_t i = 0;
  const auto take = [&] {
    uint8_t* p = at;
    at += z.parts[i++];
    return p;
  };
  main_ = reinterpret_cast<float*>(take());
  x_ = reinterpret_cast<float*>(take());
  block_ = take();
  collapsed_ = reinterpret_cast<float*>(take());
  cos_ = reinterpret_cast<float*>(take());
  sin_ = reinterpret_cast<float*>(take());
  block_cos_ = reinterpret_cast<float*>(take());
  block_sin_ = reinterpret_cast<float*>(take());
  signals_ = reinterpret_cast<float*>(take());
  row_logits_ = reinterpret_cast<float*>(take());
  const Activations mode = model_->target->activations;
  const int block = model_->sizes.block;
  uint8_t* host = at + lay_out(model_->shape, mode, block, block, nullptr, nullptr, nullptr).own;
  lay_out(model_->shape, mode, block, block, at, host, &t_);
  restart();
}

Drafter::~Drafter() { backend_->free(own_base_, own_bytes_); }

void Drafter::begin(const std::vector<LayerRows>& rows) {
  faults_.at(FaultPoint::draft_begin);
  backend_->set_poll(nullptr);
  const int64_t n = rows.front().n, position = state_.position();
  skipped_ = std::max<int64_t>(0, n - capacity_);
  for (const int l : model_->sizes.target_layers) skipped_ = std::max<int64_t>(skipped_, rows[static_cast<size_t>(l)].stream);
  // Rows in front of a gap do not count, and older ones are overwritten now.
  captured_low_ = std::max(std::min(captured_low_, position), skipped_ > 0 ? position + skipped_ : position + n - capacity_);
}

void Drafter::capture(int layer, int64_t n, const float* stream) {
  const auto& layers = model_->sizes.target_layers;
  const auto found = std::find(layers.begin(), layers.end(), layer);
  if (found == layers.end() || skipped_ == n) return;
  faults_.at(FaultPoint::draft_capture);
  const Shape& s = model_->shape;
  const int64_t wide = model_->main_dim();
  for (int64_t i = skipped_; i < n;) {
    const int64_t slot = (state_.position() + i) % capacity_;
    const int64_t m = std::min(n - i, capacity_ - slot);
    backend_->stream_mean({static_cast<int>(m), stream + i * s.n_streams * s.hidden,
                           main_ + slot * wide + (found - layers.begin()) * s.hidden, wide});
    i += m;
  }
}

void Drafter::commit() {
  faults_.at(FaultPoint::draft_commit);
  n_rows_ = 0;
}

void Drafter::follow() {
  n_rows_ = 0;
  filled_ = std::min(filled_, state_.position());
  captured_low_ = std::min(captured_low_, state_.position());
}

void Drafter::restart() {
  n_rows_ = 0;
  filled_ = captured_low_ = state_.position();
  state_.raise_extra_low(filled_);
}

int64_t Drafter::reachable() const {
  const int64_t low = std::min(state_.extra_low(), filled_);
  if (captured_low_ <= filled_) return std::min(low, captured_low_);
  return filled_ == state_.position() ? low : captured_low_;
}

int64_t Drafter::unsettled() const {
  const int64_t p = state_.position(), first = std::max(reachable(), p - model_->shape.window);
  const int64_t low = std::min(state_.extra_low(), filled_);
  if (first > filled_) return p - first;
  return std::max<int64_t>(0, low - first) + p - filled_;
}

void Drafter::settle(Poll* poll, int64_t back) {
  fill_windows(poll, wanted(back));
  done();
}

int64_t Drafter::settle_some(Poll* poll) {
  const int64_t most = std::max<int64_t>(model_->shape.window / 2, 1), position = state_.position();
  const int64_t low = std::min(state_.extra_low(), filled_), news = position - filled_;
  // Where much is new, what is behind it waits; else what is left of `most` goes behind what is there.
  const int64_t first = std::max(wanted(0), news > most ? position - most : low - (most - news));
  const int64_t n = first > filled_ ? position - first : std::max<int64_t>(0, low - first) + news;
  fill_windows(poll, first);
  done();
  return n;
}

// The first row that the windows can and shall have.
int64_t Drafter::wanted(int64_t back) const {
  return std::max({reachable(), state_.position() - model_->shape.window - back, int64_t{0}});
}

void Drafter::done() {
  backend_->wait();
  angles_busy_ = false;
}

// Rows from `first` on that are not in the windows yet; issued only.
void Drafter::fill_windows(Poll* poll, int64_t first) {
  faults_.at(FaultPoint::draft_settle);
  const int64_t position = state_.position();
  const int64_t low = std::min(state_.extra_low(), filled_);
  if (first > filled_) {  // rows in between are not wanted any more
    state_.raise_extra_low(first);
    filled_ = first;
  } else if (first < low) {  // the state went back: rows that were not wanted before
    project(first, low, poll);
    state_.raise_extra_low(first);
  }
  project(filled_, position, poll);
  filled_ = position;
}

// Captured rows first .. end - 1 become rows of the windows.
void Drafter::project(int64_t first, int64_t end, Poll* poll) {
  if (first >= end) return;
  const FlushSubnormals flush;
  const Polled polled(*backend_, poll);
  const int64_t wide = model_->main_dim();
  state_.prepare_extra(first, end - first);
  for (int64_t p = first; p < end;) {
    const int64_t slot = p % capacity_;
    const int n = static_cast<int>(std::min({kBatch, end - p, capacity_ - slot}));
    backend_->draft_main({n, main_ + slot * wide, &model_->weights.main_proj, model_->weights.main_norm, x_});
    if (angles_busy_) backend_->wait();  // those of the rows before are in use until then
    fill_rope(model_->target->frequencies, p, n, cos_, sin_);
    angles_busy_ = true;
    for (int i = 0; i < model_->n_stages(); ++i)
      backend_->draft_window({n, p, x_, &model_->weights.stages[i].attn, Rope{cos_, sin_}, window(i)});
    p += n;
  }
}

int64_t Drafter::n_context() const {
  const int64_t p = state_.position();
  return p - std::max(std::max<int64_t>(0, p - model_->shape.window), std::min(p, reachable()));
}

int64_t Drafter::in_windows() const {
  const int64_t p = state_.position();
  return std::min<int64_t>(model_->shape.window, p - std::min(state_.extra_low(), filled_));
}

namespace {

struct ContextHeader {
  uint64_t id;
  uint32_t stages, rows;
};
static_assert(sizeof(ContextHeader) == 16, "as documented");

}  // namespace

std::vector<uint8_t> Drafter::export_context() const {
  const int64_t rows = n_context(), at = state_.position();
  if (rows == 0) return {};
  const ContextHeader h{model_->rows_id(), static_cast<uint32_t>(model_->n_stages()), static_cast<uint32_t>(rows)};
  const size_t row_bytes = static_cast<size_t>(model_->shape.window_row_bytes());
  std::vector<uint8_t> out(sizeof h + h.stages * h.rows * row_bytes);
  std::memcpy(out.data(), &h, sizeof h);
  uint8_t* to = out.data() + sizeof h;
  for (int i = 0; i < model_->n_stages(); ++i)
    for (int64_t p = at - rows; p < at; ++p, to += row_bytes) std::memcpy(to, window(i).row(p), row_bytes);
  return out;
}

int64_t Drafter::import_context(const State::Reader& read, size_t bytes) {
  restart();
  ContextHeader h{};
  const size_t row_bytes = static_cast<size_t>(model_->shape.window_row_bytes());
  if (bytes >= sizeof h) read(reinterpret_cast<uint8_t*>(&h), sizeof h);
  const int64_t rows = h.rows, at = state_.position();
  if (bytes < sizeof h || rows > at || rows > model_->shape.window || h.stages > 64 ||
      bytes != sizeof h + h.stages * static_cast<size_t>(rows) * row_bytes)
    throw StoreError("[frontier] its drafter state has the wrong length; it is not used");
  const bool mine = h.id == model_->rows_id() && h.stages == static_cast<uint32_t>(model_->n_stages());
  if (mine) state_.prepare_extra(at - rows, rows);
  std::vector<uint8_t> left(row_bytes);
  for (uint32_t i = 0; i < h.stages; ++i)
    for (int64_t p = at - rows; p < at; ++p) read(mine ? window(static_cast<int>(i)).row(p) : left.data(), row_bytes);
  return mine ? rows : 0;
}

void Drafter::accept_context(int64_t rows) {
  restart();
  state_.raise_extra_low(state_.position() - rows);
}

void Drafter::start(int32_t anchor, int n_rows, Poll* poll, bool settled) {
  const Shape& s = model_->shape;
  const int most = model_->sizes.block;
  if (anchor < 0 || anchor >= s.vocab)
    throw TokenError("[draft] the anchor is " + std::to_string(anchor) + "; expected 0 .. " + std::to_string(s.vocab - 1));
  if (n_rows < 1 || n_rows > most)
    throw OptionError("[draft] expected 1 to " + std::to_string(most) + " rows, got " + std::to_string(n_rows));
  if (state_.position() == 0) throw StateError("[draft] there is nothing to draft from: the session is empty");
  n_rows_ = 0;
  const auto start_time = std::chrono::steady_clock::now();
  try {
    backend_->wait();  // a draft before may still be read from the memory that is written below
    angles_busy_ = false;
    fill_windows(poll, settled ? std::max(wanted(0), std::min(state_.extra_low(), filled_)) : wanted(0));
    faults_.at(FaultPoint::draft_start);
    block(anchor, n_rows, poll);
  } catch (...) {
    if (ledger_ != nullptr) ledger_->clear();  // a draft that stopped half-way would leave it incomplete
    throw;
  }
  n_rows_ = n_rows;
  if (ledger_ != nullptr) ledger_->add_draft(model_->sizes.block, since(start_time));
}

void Drafter::block(int32_t anchor, int n_rows, Poll* poll) {
  const int block = model_->sizes.block;
  const FlushSubnormals flush;
  const Polled polled(*backend_, poll);
  t_.tokens[0] = anchor;
  for (int i = 1; i < block; ++i) t_.tokens[i] = model_->sizes.noise;
  fill_rope(model_->target->frequencies, state_.position(), block, block_cos_, block_sin_);
  backend_->embed({block, t_.tokens, &model_->target->weights.embed, t_.stream, t_.mix});
  for (int i = 0; i < model_->n_stages(); ++i) stage(i);
  backend_->collapse({n_rows, t_.stream, t_.mix, collapsed_});
  backend_->head({n_rows, t_.stream, t_.mix, model_->weights.norm, &model_->target->weights.head, t_.head_x, t_.logits});
}

void Drafter::start_ledger() {
  if (ledger_ != nullptr) return ledger_->clear();
  auto ledger = std::make_unique<Ledger>(std::move(backend_), model_->shape, model_->weights.stages, true);
  ledger_ = ledger.get();
  backend_ = std::move(ledger);
}

// One stage: a layer without ratio whose attention sees the context and the whole block.
void Drafter::stage(int i) {
  const LayerWeights& w = model_->weights.stages[i];
  const int n = model_->sizes.block;
  const int64_t position = state_.position();
  const Rope rope{block_cos_, block_sin_};
  const RowRing block{block_, n, model_->shape.window_row_bytes()};
  backend_->hc_read({n, t_.stream, t_.mix, &w.hc_attn, t_.x, t_.xq, t_.pre, t_.post, t_.comb});
  backend_->attn_in({n, position, t_.xq, &w.attn, rope, t_.qr, block});
  backend_->attn_query({n, t_.qr, &w.attn, rope, t_.q});
  backend_->draft_attend({n, position, position - in_windows(), t_.q, window(i), block, w.attn.sink, rope, t_.o});
  backend_->attn_out({n, t_.o, &w.attn, t_.low, t_.y});
  backend_->hc_write({n, t_.y, t_.post, t_.comb, t_.stream});
  backend_->hc_read({n, t_.stream, t_.pre, &w.hc_ffn, t_.x, t_.xq, t_.mix, t_.post, t_.comb});
  backend_->route({n, t_.x, &w.moe, t_.route_scores, t_.experts, t_.expert_weights});
  backend_->moe({n, t_.xq, &w.moe, t_.experts, t_.expert_weights, t_.mid, t_.y});
  backend_->hc_write({n, t_.y, t_.post, t_.comb, t_.stream});
}

const float* Drafter::row(int i, int32_t previous, Signals* signals) {
  const Shape& s = model_->shape;
  if (i < 0 || i >= n_rows_)
    throw StateError("[draft] row " + std::to_string(i) + " of a draft of " + std::to_string(n_rows_) +
                     " rows: start a draft at the present position first");
  if (previous < 0 || previous >= s.vocab)
    throw TokenError("[draft] the token before is " + std::to_string(previous) + "; expected 0 .. " + std::to_string(s.vocab - 1));
  faults_.at(FaultPoint::draft_row);
  const auto start_time = std::chrono::steady_clock::now();
  const FlushSubnormals flush;
  const DrafterWeights& w = model_->weights;
  backend_->markov({previous, &w.markov_embed, &w.markov_head, &w.confidence, collapsed_ + static_cast<int64_t>(i) * s.hidden,
                    t_.logits + static_cast<int64_t>(i) * s.vocab, row_logits_, signals != nullptr ? signals_ : nullptr,
                    signals != nullptr ? signals_ + 1 : nullptr});
  backend_->wait();
  if (signals != nullptr) *signals = {signals_[0], signals_[1]};
  if (ledger_ != nullptr) ledger_->add_seconds(since(start_time));
  if (faults_.hit(FaultPoint::draft_nan)) std::fill(row_logits_, row_logits_ + s.vocab, std::numeric_limits<float>::quiet_NaN());
  return row_logits_;
}

std::vector<float> Drafter::captured() const {
  const int64_t wide = model_->main_dim();
  std::vector<float> out;
  for (int64_t p = filled_; p < state_.position(); ++p)
    out.insert(out.end(), main_ + p % capacity_ * wide, main_ + (p % capacity_ + 1) * wide);
  return out;
}

}  // namespace ds4
