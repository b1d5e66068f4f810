#include "engine/drafter.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "engine/rope.h"

namespace ds4 {

namespace {

constexpr int64_t kBatch = 64;  // captured rows that are projected together
constexpr int64_t kSlack = 256;  // rows kept beyond the window, so that going back a little finds a full one

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

size_t aligned(size_t bytes) { return (bytes + 255) & ~size_t{255}; }

}  // namespace

Drafter::Sizes Drafter::sizes_of(const DrafterModel& model, int64_t chunk) {
  const Shape& s = model.shape;
  const int block = model.sizes.block;
  Sizes z;
  z.capacity = std::min(std::max(chunk, kBatch), s.window + kSlack);
  const int64_t angles = kBatch * (s.rope_dim / 2);
  const int64_t block_angles = int64_t{block} * (s.rope_dim / 2);
  const int64_t bytes[10] = {z.capacity * model.main_dim() * 4, kBatch * s.hidden * 4,
                            static_cast<int64_t>(block) * s.window_row_bytes(), static_cast<int64_t>(block) * s.hidden * 4,
                            angles * 4, angles * 4, block_angles * 4, block_angles * 4, 2 * 4, int64_t{s.vocab} * 4};
  for (int i = 0; i < 10; ++i) z.total += z.parts[i] = aligned(static_cast<size_t>(bytes[i]));
  z.scratch = lay_out(s, model.target->activations, block, block, nullptr, nullptr);
  z.total += z.scratch;
  return z;
}

size_t Drafter::bytes(const DrafterModel& model, int64_t chunk) { return sizes_of(model, chunk).total; }

Drafter::Drafter(std::shared_ptr<const DrafterModel> model, State& state, const Backend& backend, int64_t chunk)
    : model_(std::move(model)), state_(state), backend_(backend.sibling(model_->shape)) {
  const Sizes z = sizes_of(*model_, chunk);
  capacity_ = z.capacity;
  own_bytes_ = z.total;
  own_base_ = static_cast<uint8_t*>(backend_->alloc(own_bytes_));
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
  lay_out(model_->shape, model_->target->activations, model_->sizes.block, model_->sizes.block, at, &t_);
  restart();
}

Drafter::~Drafter() { backend_->free(own_base_, own_bytes_); }

void Drafter::begin(int64_t n) {
  backend_->set_poll(nullptr);
  if (state_.position() - filled_ + n > capacity_) settle(nullptr);
  skipped_ = std::max<int64_t>(0, n - capacity_);
}

void Drafter::capture(int layer, int64_t n, const float* stream) {
  const auto& layers = model_->sizes.target_layers;
  const auto found = std::find(layers.begin(), layers.end(), layer);
  if (found == layers.end()) return;
  const Shape& s = model_->shape;
  const int64_t wide = model_->main_dim(), pending = state_.position() - filled_;
  backend_->stream_mean({static_cast<int>(n - skipped_), stream + skipped_ * s.n_streams * s.hidden,
                         main_ + pending * wide + (found - layers.begin()) * s.hidden, wide});
}

void Drafter::commit(int64_t n) {
  n_rows_ = 0;
  if (skipped_ == 0) return;
  filled_ = state_.position() - (n - skipped_);
  state_.raise_extra_low(filled_);
}

void Drafter::follow() {
  n_rows_ = 0;
  filled_ = std::min(filled_, state_.position());
}

void Drafter::restart() {
  n_rows_ = 0;
  filled_ = state_.position();
  state_.raise_extra_low(filled_);
}

void Drafter::settle(Poll* poll) {
  fill_windows(poll);
  backend_->wait();
}

// The same, issued only.
void Drafter::fill_windows(Poll* poll) {
  const FlushSubnormals flush;
  const Polled polled(*backend_, poll);
  const int64_t first = filled_, total = state_.position() - filled_, wide = model_->main_dim();
  state_.prepare_extra(first, total);
  for (int64_t done = 0; done < total; done += kBatch) {
    const int n = static_cast<int>(std::min(kBatch, total - done));
    const int64_t position = first + done;
    backend_->draft_main({n, main_ + done * wide, &model_->weights.main_proj, model_->weights.main_norm, x_});
    if (done > 0) backend_->wait();  // the angles of the batch before are in use until then
    fill_rope(model_->target->frequencies, position, n, cos_, sin_);
    for (int i = 0; i < model_->n_stages(); ++i)
      backend_->draft_window({n, position, x_, &model_->weights.stages[i].attn, Rope{cos_, sin_}, window(i)});
  }
  filled_ = state_.position();
}

int64_t Drafter::n_context() const {
  const int64_t p = state_.position();
  return p - std::max(std::max<int64_t>(0, p - model_->shape.window), std::min(p, state_.extra_low()));
}

void Drafter::start(int32_t anchor, int n_rows, Poll* poll) {
  const Shape& s = model_->shape;
  const int block = model_->sizes.block;
  if (anchor < 0 || anchor >= s.vocab)
    throw TokenError("[draft] the anchor is " + std::to_string(anchor) + "; expected 0 .. " + std::to_string(s.vocab - 1));
  if (n_rows < 1 || n_rows > block)
    throw OptionError("[draft] expected 1 to " + std::to_string(block) + " rows, got " + std::to_string(n_rows));
  if (state_.position() == 0) throw StateError("[draft] there is nothing to draft from: the session is empty");
  n_rows_ = 0;
  backend_->wait();  // a draft before may still be read from the memory that is written below
  fill_windows(poll);
  const FlushSubnormals flush;
  const Polled polled(*backend_, poll);
  t_.tokens[0] = anchor;
  for (int i = 1; i < block; ++i) t_.tokens[i] = model_->sizes.noise;
  fill_rope(model_->target->frequencies, state_.position(), block, block_cos_, block_sin_);
  backend_->embed({block, t_.tokens, &model_->target->weights.embed, t_.stream, t_.mix});
  for (int i = 0; i < model_->n_stages(); ++i) stage(i);
  backend_->collapse({n_rows, t_.stream, t_.mix, collapsed_});
  backend_->head({n_rows, t_.stream, t_.mix, model_->weights.norm, &model_->target->weights.head, t_.head_x, t_.logits});
  n_rows_ = n_rows;
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
  backend_->draft_attend({n, position, position - n_context(), t_.q, window(i), block, w.attn.sink, rope, t_.o});
  backend_->attn_out({n, t_.o, &w.attn, t_.low, t_.y});
  backend_->hc_write({n, t_.y, t_.post, t_.comb, t_.stream});
  backend_->hc_read({n, t_.stream, t_.pre, &w.hc_ffn, t_.x, t_.xq, t_.mix, t_.post, t_.comb});
  backend_->route({n, t_.x, &w.moe, t_.route_scores, t_.experts, t_.expert_weights});
  backend_->moe({n, t_.xq, &w.moe, t_.experts, t_.expert_weights, t_.mid, t_.y});
  backend_->hc_write({n, t_.y, t_.post, t_.comb, t_.stream});
}

Drafter::Signals Drafter::row(int i, int32_t previous, float* logits) {
  const Shape& s = model_->shape;
  if (i < 0 || i >= n_rows_)
    throw StateError("[draft] row " + std::to_string(i) + " of a draft of " + std::to_string(n_rows_) +
                     " rows: start a draft at the present position first");
  if (previous < 0 || previous >= s.vocab)
    throw TokenError("[draft] the token before is " + std::to_string(previous) + "; expected 0 .. " + std::to_string(s.vocab - 1));
  const FlushSubnormals flush;
  const DrafterWeights& w = model_->weights;
  backend_->markov({previous, &w.markov_embed, &w.markov_head, &w.confidence, collapsed_ + static_cast<int64_t>(i) * s.hidden,
                    t_.logits + static_cast<int64_t>(i) * s.vocab, row_logits_, signals_, signals_ + 1});
  backend_->wait();
  std::memcpy(logits, row_logits_, static_cast<size_t>(s.vocab) * sizeof(float));
  return {signals_[0], signals_[1]};
}

std::vector<float> Drafter::captured() const {
  const int64_t n = state_.position() - filled_;
  return {main_, main_ + n * model_->main_dim()};
}

}  // namespace ds4
