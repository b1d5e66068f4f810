#include "engine/session.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>

#include "base/error.h"
#include "engine/rope.h"

namespace ds4 {

Session::Session(std::shared_ptr<const Model> model, int64_t context, int64_t retain, int64_t chunk,
                 std::shared_ptr<const DrafterModel> drafter, bool every_row)
    : model_(std::move(model)),
      backend_(model_->make_backend()),
      state_(model_->shape, *backend_, context, retain, chunk, drafter ? drafter->n_stages() : 0),
      chunk_(chunk),
      slack_(std::min(kSlack, retain)),
      every_row_(every_row),
      feed_(*model_, *backend_) {
  if (!drafter) return;
  if (drafter->target != model_) throw OptionError("[session] this drafter was opened for another model");
  drafter_ = std::make_unique<Drafter>(std::move(drafter), state_, *backend_, faults_);
}

Session::~Session() { free_scratch(); }

void Session::free_scratch() {
  backend_->free(scratch_base_, scratch_bytes_.own);
  backend_->free(scratch_host_, scratch_bytes_.host);
  scratch_base_ = scratch_host_ = nullptr;
  scratch_bytes_ = {};
}

void Session::check_tokens(const int32_t* tokens, int64_t n) const {
  if (n < 1) throw TokenError("[run] expected at least one token, got none");
  if (n > chunk_)
    throw OptionError("[run] expected at most " + std::to_string(chunk_) + " tokens in one run, got " + std::to_string(n));
  if (state_.position() + n > state_.context())
    throw ContextError("[run] " + std::to_string(n) + " tokens do not fit: position " +
                       std::to_string(state_.position()) + " of a context of " + std::to_string(state_.context()));
  for (int64_t i = 0; i < n; ++i)
    if (tokens[i] < 0 || tokens[i] >= model_->shape.vocab)
      throw TokenError("[run] token " + std::to_string(i) + " is " + std::to_string(tokens[i]) +
                       "; expected 0 .. " + std::to_string(model_->shape.vocab - 1));
}

void Session::reserve_scratch(int64_t n, int64_t n_logits) {
  const Shape& s = model_->shape;
  const ScratchBytes want = lay_out(s, model_->activations, n, n_logits, nullptr, nullptr, nullptr), have = scratch_bytes_;
  // Grows for a long prefill and shrinks again after it, so that a decoding session holds little.
  if (want.own > have.own || want.host > have.host || want.total() < have.total() / 8) {
    free_scratch();
    scratch_base_ = static_cast<uint8_t*>(backend_->alloc(want.own));
    scratch_bytes_.own = want.own;
    scratch_host_ = static_cast<uint8_t*>(backend_->alloc_for_host(want.host));
    scratch_bytes_.host = want.host;
  }
  lay_out(s, model_->activations, n, n_logits, scratch_base_, scratch_host_, &t_);
}

namespace {

// Lets a trace see what was issued so far, done.
class DoneTrace final : public Trace {
 public:
  DoneTrace(Trace& inner, Backend& backend) : inner_(inner), backend_(backend) {}
  void tap(int layer, const char* name, const float* data, std::initializer_list<int64_t> shape) override {
    backend_.wait();
    inner_.tap(layer, name, data, shape);
  }
  void tap(int layer, const char* name, const int32_t* data, std::initializer_list<int64_t> shape) override {
    backend_.wait();
    inner_.tap(layer, name, data, shape);
  }
  bool wants(const char* name) override { return inner_.wants(name); }
  void enter(int layer, float* stream, float* mix, int64_t n) override {
    backend_.wait();
    inner_.enter(layer, stream, mix, n);
  }
  void after_engram(int layer, float* stream, int64_t n) override {
    backend_.wait();
    inner_.after_engram(layer, stream, n);
  }

 private:
  Trace& inner_;
  Backend& backend_;
};

// Memory of the back end for as long as this lives; for what only a trace wants.
class TraceMemory {
 public:
  TraceMemory(Backend& backend, int64_t n) : backend_(backend), bytes_(static_cast<size_t>(n) * sizeof(float)) {
    if (n > 0) data_ = static_cast<float*>(backend.alloc(bytes_));
  }
  ~TraceMemory() { backend_.free(data_, bytes_); }
  TraceMemory(const TraceMemory&) = delete;
  TraceMemory& operator=(const TraceMemory&) = delete;
  float* data() const { return data_; }

 private:
  Backend& backend_;
  size_t bytes_;
  float* data_ = nullptr;
};

// The open pair's unpooled rows, put back when a run fails half-way.
class PendingGuard {
 public:
  explicit PendingGuard(const State& state, int n_sources) : state_(state) {
    if (state.position() % 2 == 0) return;
    for (int i = 0; i < n_sources; ++i) {
      const RowRing ring = state.pending(i);
      const uint8_t* row = ring.row(state.position() - 1);
      rows_.emplace_back(row, row + ring.row_bytes);
    }
  }
  void restore() const {
    for (size_t i = 0; i < rows_.size(); ++i)
      std::memcpy(state_.pending(static_cast<int>(i)).row(state_.position() - 1), rows_[i].data(), rows_[i].size());
  }

 private:
  const State& state_;
  std::vector<std::vector<uint8_t>> rows_;
};

}  // namespace

void Session::run(const int32_t* tokens, int64_t n, Logits logits, float* out, Poll* poll, int64_t after, Trace* trace,
                  NumericClass c) {
  check_tokens(tokens, n);
  if (after < 0) throw OptionError("[run] expected 0 or more tokens to come after these, got " + std::to_string(after));
  const bool every_row = every_row_ || logits == Logits::all || trace != nullptr;
  const Aim aim = aim_of_run(n + (logits == Logits::none ? after : 0), every_row);
  bring(aim, poll);
  if (trace == nullptr) return run_rows(tokens, n, run_cone(aim), logits, out, poll, nullptr, c);
  DoneTrace done(*trace, *backend_);
  run_rows(tokens, n, run_cone(aim), logits, out, poll, &done, c);
}

void Session::run_rows(const int32_t* tokens, int64_t n, const Cone& cone, Logits logits, float* out, Poll* poll,
                       Trace* trace, NumericClass c) {
  FlushSubnormals flush;
  const Shape& s = model_->shape;
  const int64_t n_logits = logits == Logits::all ? n : (logits == Logits::last ? 1 : 0);
  const PendingGuard guard(state_, s.n_sources());
  reserve_scratch(n, n_logits);
  backend_->set_poll(poll);
  backend_->set_class(c);
  const auto rows = rows_of(s, cone, state_.position(), static_cast<int>(n));
  beside([&](Drafter& d) { d.begin(rows); });
  state_.prepare(n, cone.window, cone.entries);
  final_position_ = -1;
  const auto start_time = std::chrono::steady_clock::now();
  try {
    faults_.at(FaultPoint::run_start);
    start(tokens, n);
    run_layers(rows, poll, trace);
    if (n_logits > 0) head(n, n_logits, trace);
    feed_.settle(poll);
    backend_->wait();
    check_finite(n, rows[0].stream);
    take_logits(n_logits, out);
    faults_.at(FaultPoint::run_head);
    if (rows.back().full < n) keep_final(n);
    faults_.at(FaultPoint::run_commit);
    state_.commit(tokens, n, c);
  } catch (...) {
    feed_.abandon();
    backend_->abandon();
    guard.restore();
    state_.undo_prepare(n);
    if (ledger_ != nullptr) ledger_->clear();  // a run that stopped half-way would leave it incomplete
    throw;
  }
  if (ledger_ != nullptr)
    ledger_->add_run(rows, n_logits > 0,
                     std::chrono::duration<double>(std::chrono::steady_clock::now() - start_time).count());
  beside([&](Drafter& d) { d.commit(); });
}

void Session::run_layers(const std::vector<LayerRows>& rows, Poll* poll, Trace* trace) {
  int total = 0, done = 0;
  for (const LayerRows& r : rows) total += r.n - r.stream;
  for (size_t l = 0; l < rows.size() && rows[l].stream < rows[l].n; ++l) {
    if (poll != nullptr && !replaying_) poll->progress(done, total);
    layer(static_cast<int>(l), rows[l], poll, trace);
    faults_.at(FaultPoint::run_layer);
    done += rows[l].n - rows[l].stream;
  }
}

void Session::check_finite(int64_t n, int64_t first) const {
  // A mix is made of a product over the whole stream: one NaN anywhere in a row makes it NaN. `pre` is the one that
  // the last layer made of the stream that entered it, for rows that went no further.
  const int64_t c = model_->shape.n_streams;
  for (int64_t i = first * c; i < n * c; ++i)
    if (!(t_.mix[i] - t_.mix[i] == 0.0f) || !(t_.pre[i] - t_.pre[i] == 0.0f))
      throw NumericsError("[run] the activations of the token at position " + std::to_string(state_.position() + i / c) +
                          " are not finite numbers; the session is unchanged. Open the model with check=True to find out "
                          "whether its weights hold NaN or infinity");
}

void Session::expect(const int32_t* tokens, int64_t n) {
  expected_.clear();
  if (n < 1 || n > chunk_) return;
  for (int64_t i = 0; i < n; ++i)
    if (tokens[i] < 0 || tokens[i] >= model_->shape.vocab) return;  // the run itself will say so
  expected_.assign(tokens, tokens + n);
}

void Session::start_ledger() {
  if (drafter_) drafter_->start_ledger();
  if (ledger_ != nullptr) return ledger_->clear();
  auto ledger = std::make_unique<Ledger>(std::move(backend_), model_->shape, model_->weights.layers);
  ledger_ = ledger.get();
  backend_ = std::move(ledger);
}

void Session::fill_for_benchmark(int64_t position, uint64_t seed) {
  if (state_.position() != 0) throw StateError("[fill] only an empty session can be filled for a benchmark");
  if (position < 0 || position > state_.context() || position % 2 != 0)
    throw OptionError("[fill] expected an even position from 0 to " + std::to_string(state_.context()) + ", got " +
                      std::to_string(position));
  state_.fill_for_benchmark(position, seed);
  if (drafter_) drafter_->restart();
}

void Session::start(const int32_t* tokens, int64_t n) {
  std::memcpy(t_.tokens, tokens, static_cast<size_t>(n) * sizeof(int32_t));
  const int64_t history = std::min<int64_t>(state_.position(), model_->hash.max_ngram() - 1);
  line_.assign(state_.tokens().end() - history, state_.tokens().end());
  line_.insert(line_.end(), tokens, tokens + n);
  line_.insert(line_.end(), expected_.begin(), expected_.end());
  // First of all: the disk has until the layers ask.
  feed_.begin(line_.data(), history, n, static_cast<int64_t>(expected_.size()));
  expected_.clear();
  // One row before the run as well: a pair that this run closes is rotated at its first token.
  const int64_t first = std::max<int64_t>(0, state_.position() - 1);
  const int rows = static_cast<int>(n + (state_.position() > 0 ? 1 : 0));
  fill_rope(model_->frequencies, first, rows, t_.cos, t_.sin);
  fill_rope(model_->yarn_frequencies, first, rows, t_.yarn_cos, t_.yarn_sin);
  backend_->embed({static_cast<int>(n), t_.tokens, &model_->weights.embed, t_.stream, t_.mix});
}

void Session::engram(int l, const LayerRows& r, Poll* poll, const Trace* trace) {
  const Shape& s = model_->shape;
  backend_->submit();
  const FedRows fed = feed_.take(s.engram_index[l], ledger_ == nullptr && trace == nullptr, poll);
  if (ledger_ != nullptr) ledger_->add_engram_rows(l, fed.waited, fed.hidden, fed.bytes);
  const uint8_t* rows = fed.data + int64_t{r.stream} * s.engram_columns * s.engram_row_bytes();
  backend_->engram({r.n - r.stream, rows, &model_->weights.layers[l].engram, t_.from(s, r.stream).stream});
}

// Rows from r.stream on enter the layer; those from r.full on go through all of it, the others leave their window row
// or compressed row and stop. A trace sees runs in which all rows go through.
void Session::layer(int l, const LayerRows& r, Poll* poll, Trace* trace) {
  const Shape& s = model_->shape;
  const LayerWeights& w = model_->weights.layers[l];
  const int64_t c = s.n_streams, d = s.hidden;
  if (trace != nullptr) trace->enter(l, t_.stream, t_.mix, r.n);
  if (s.engram_index[l] >= 0) {
    engram(l, r, poll, trace);
    if (trace != nullptr) trace->tap(l, "engram_out", t_.stream, {r.n, c, d});
  }
  if (trace != nullptr) trace->after_engram(l, t_.stream, r.n);
  beside([&](Drafter& drafter) { drafter.capture(l, r.n, t_.stream); });

  const Scratch in = t_.from(s, r.stream);
  backend_->hc_read({r.n - r.stream, in.stream, in.mix, &w.hc_attn, in.x, in.xq, in.pre, in.post, in.comb});
  if (trace != nullptr) {
    trace->tap(l, "hc_attn_pre", t_.pre, {r.n, c});
    trace->tap(l, "hc_attn_post", t_.post, {r.n, c});
    trace->tap(l, "hc_attn_comb", t_.comb, {r.n, c, c});
    trace->tap(l, "attn_in", t_.x, {r.n, d});
  }
  attention_in(l, r);
  const int n = r.n - r.full;
  if (n == 0) return;
  attention(l, r, trace);
  const Scratch t = t_.from(s, r.full);
  backend_->hc_write({n, t.y, t.post, t.comb, t.stream});

  backend_->hc_read({n, t.stream, t.pre, &w.hc_ffn, t.x, t.xq, t.mix, t.post, t.comb});
  if (trace != nullptr) {
    trace->tap(l, "hc_ffn_pre", t_.mix, {n, c});
    trace->tap(l, "hc_ffn_post", t_.post, {n, c});
    trace->tap(l, "hc_ffn_comb", t_.comb, {n, c, c});
    trace->tap(l, "ffn_in", t_.x, {n, d});
  }
  backend_->route({n, t.x, &w.moe, t.route_scores, t.experts, t.expert_weights});
  backend_->moe({n, t.xq, &w.moe, t.experts, t.expert_weights, t.mid, t.y});
  if (trace != nullptr) {
    trace->tap(l, "router_indices", t_.experts, {n, s.top_k});
    trace->tap(l, "router_weights", t_.expert_weights, {n, s.top_k});
    trace->tap(l, "ffn_out", t_.y, {n, d});
  }
  backend_->hc_write({n, t.y, t.post, t.comb, t.stream});
  if (trace != nullptr) {
    trace->tap(l, "stream_out", t_.stream, {n, c, d});
    trace->tap(l, "pre_mix_out", t_.mix, {n, c});
  }
}

Rope Session::rope(int l, const Scratch& t) const {
  const int64_t before = state_.position() > 0 ? model_->shape.rope_dim / 2 : 0;  // the row in front of the run
  if (model_->shape.ratio[l] > 0) return {t.yarn_cos + before, t.yarn_sin + before};
  return {t.cos + before, t.sin + before};
}

// What a layer leaves in the caches.
void Session::attention_in(int l, const LayerRows& r) {
  const Shape& s = model_->shape;
  const LayerWeights& w = model_->weights.layers[l];
  const int64_t position = state_.position();
  if (r.window < r.n) {
    const Scratch t = t_.from(s, r.window);
    backend_->attn_in({r.n - r.window, position + r.window, t.xq, &w.attn, rope(l, t), t.qr, state_.window(l)});
  }
  if (r.entries == r.n) return;
  const int source = s.kv_source[l];
  const Rope from_before{s.ratio[l] > 0 ? t_.yarn_cos : t_.cos, s.ratio[l] > 0 ? t_.yarn_sin : t_.sin};
  backend_->compress({r.n - r.entries, position + r.entries, s.ratio[l], t_.from(s, r.entries).x, &w.compressor,
                      from_before, std::max<int64_t>(0, position - 1), state_.pending(source), state_.compressed(source),
                      state_.index(source)});
}

void Session::attention(int l, const LayerRows& r, Trace* trace) {
  const Shape& s = model_->shape;
  const LayerWeights& w = model_->weights.layers[l];
  const Scratch t = t_.from(s, r.full);
  const int n = r.n - r.full;
  const int source = s.kv_source[l];
  if (s.index_source[l] == l) {
    backend_->index_query({n, t.qr, t.x, &w.indexer, rope(l, t), t.index_codes, t.index_scales, t.index_weights});
    select(l, r, trace);
  }
  backend_->attn_query({n, t.qr, &w.attn, rope(l, t), t.q});
  const int64_t hd = s.head_dim, heads = s.n_heads;
  const TraceMemory raw(*backend_, trace != nullptr && trace->wants("attn_o") ? n * heads * hd : 0);
  backend_->attend({n, state_.position() + r.full, t.q, state_.window(l),
                    source >= 0 ? state_.compressed(source) : nullptr, t.selected, t.n_selected, w.attn.sink, rope(l, t),
                    t.o, raw.data()});
  backend_->attn_out({n, t.o, &w.attn, t.low, t.y});
  if (trace == nullptr) return;
  trace->tap(l, "attn_q", t_.q, {n, heads, hd});
  if (raw.data() != nullptr) trace->tap(l, "attn_o", raw.data(), {n, heads, hd});
  if (source >= 0) {
    trace->tap(l, "selected", t_.selected, {n, s.index_topk});
    trace->tap(l, "n_selected", t_.n_selected, {n});
  }
  trace->tap(l, "attn_out", t_.y, {n, s.hidden});
}

void Session::select(int l, const LayerRows& r, Trace* trace) {
  const Shape& s = model_->shape;
  const Scratch t = t_.from(s, r.full);
  const int n = r.n - r.full;
  const int source = s.kv_source[l];
  const int64_t position = state_.position() + r.full;
  const bool makes = l == s.candidate_source;
  const bool uses = s.candidate_source >= 0 && l > s.candidate_source;
  const int64_t stride = (position + n) / s.ratio[l];
  const TraceMemory scores(*backend_, trace != nullptr && trace->wants("index_scores") ? n * stride : 0);
  if (scores.data() != nullptr) std::fill(scores.data(), scores.data() + n * stride, -__builtin_inff());
  backend_->select({n, position, s.ratio[l], t.index_codes, t.index_scales, t.index_weights, state_.index(source),
                    t.selected, t.n_selected, makes ? t.blocks : nullptr, t.n_blocks, uses ? t.blocks : nullptr,
                    t.n_blocks, scores.data(), stride});
  if (trace == nullptr) return;
  if (scores.data() != nullptr) trace->tap(l, "index_scores", scores.data(), {n, stride});
  trace->tap(l, "index_weights", t_.index_weights, {n, s.index_heads});
  if (makes) {
    trace->tap(l, "candidate_blocks", t_.blocks, {n, s.candidate_blocks});
    trace->tap(l, "n_candidate_blocks", t_.n_blocks, {n});
  }
}

void Session::head(int64_t n, int64_t n_logits, Trace* trace) {
  const Shape& s = model_->shape;
  const int64_t skip = n - n_logits;
  backend_->head({static_cast<int>(n_logits), t_.stream + skip * s.n_streams * s.hidden, t_.mix + skip * s.n_streams,
                  model_->weights.norm, &model_->weights.head, t_.head_x, t_.logits});
  if (trace != nullptr) trace->tap(-1, "final_norm_out", t_.head_x, {n_logits, s.hidden});
}

void Session::take_logits(int64_t n_logits, float* out) const {
  if (n_logits > 0 && out != nullptr)
    std::memcpy(out, t_.logits, static_cast<size_t>(n_logits * model_->shape.vocab) * sizeof(float));
}

}  // namespace ds4
