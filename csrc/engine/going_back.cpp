// Rewinding, forking, and frontiers: everything by which a session gets to a state without running all of its tokens.
#include <algorithm>
#include <cstring>
#include <string>

#include "base/error.h"
#include "engine/session.h"
#include "kv/xxh64.h"

namespace ds4 {

int Session::truncate(int64_t position, Poll* poll) {
  const bool within = position > 0 && position <= state_.position();
  const int32_t last = within ? state_.tokens()[static_cast<size_t>(position - 1)] : 0;
  const int again = state_.truncate(position);
  if (drafter_) drafter_->follow();
  if (final_position_ != position) final_position_ = -1;
  // An open pair's first row is gone: run its token again (same bits, by E1).
  if (again == 0) return 0;
  try {
    run(&last, 1, Logits::none, nullptr, poll);
  } catch (...) {
    state_.forget_marks_above_here();
    throw;
  }
  return 1;
}

void Session::truncate(const Mark& mark) {
  state_.truncate(mark);
  if (final_position_ != mark.position) final_position_ = -1;
  if (drafter_) drafter_->follow();
}

int64_t Session::rewind(int64_t position, Poll* poll) {
  if (position < 0 || position > state_.position())
    throw StateError("[rewind] expected a position between 0 and " + std::to_string(state_.position()) + ", got " +
                     std::to_string(position));
  if (state_.reaches(position)) return truncate(position, poll);
  const auto& all = state_.tokens();
  return replay(std::vector<int32_t>(all.begin(), all.begin() + position), poll);
}

int64_t Session::complete(Poll* poll) {
  return state_.ready() ? 0 : replay(std::vector<int32_t>(state_.tokens()), poll);
}

int64_t Session::replay(const std::vector<int32_t>& tokens, Poll* poll) {
  const int64_t position = static_cast<int64_t>(tokens.size());
  const int64_t start = state_.replay_start(position);
  // An odd position has an open pair; its row comes from a plain run of the last token.
  const int64_t end = position % 2 == 1 ? position - 1 : position;
  state_.begin_replay(start, position);
  replaying_ = true;
  try {
    keep_entries_ = true;
    for (int64_t p = start; p < end; p += chunk_)
      run_rows(&tokens[static_cast<size_t>(p)], std::min(chunk_, end - p), Logits::none, nullptr, poll, nullptr);
    keep_entries_ = false;
    if (end < position) run_rows(&tokens[static_cast<size_t>(end)], 1, Logits::none, nullptr, poll, nullptr);
  } catch (...) {
    keep_entries_ = replaying_ = false;
    final_position_ = -1;
    state_.abandon_replay(tokens);
    if (drafter_) drafter_->restart();
    throw;
  }
  replaying_ = false;
  state_.end_replay();
  if (drafter_) drafter_->restart();
  return position - start;
}

std::shared_ptr<Mark> Session::mark(Poll* poll) {
  complete(poll);
  beside([](Drafter& d) { d.settle(nullptr); });
  return state_.mark();
}

Session::Session(const Session& parent, int)
    : model_(parent.model_),
      backend_(model_->make_backend()),
      state_(parent.state_, *backend_),
      chunk_(parent.chunk_),
      feed_(*model_, *backend_),
      final_(parent.final_),
      final_position_(parent.final_position_) {
  if (parent.drafter_ == nullptr) return;
  drafter_ = std::make_unique<Drafter>(parent.drafter_->shared_model(), state_, *backend_, chunk_);
  state_.raise_extra_low(parent.state_.extra_low());  // its rows are there already
}

std::unique_ptr<Session> Session::fork() {
  beside([](Drafter& d) { d.settle(nullptr); });
  return std::unique_ptr<Session>(new Session(*this, 0));
}

void Session::begin_restore(int64_t keep) {
  state_.begin_restore(keep);
  final_position_ = -1;
  if (drafter_) drafter_->restart();
}

void Session::finish_restore(const int32_t* tokens, int64_t n) {
  state_.finish_restore(tokens, n);
  if (drafter_) drafter_->restart();
}

// ---- the last row -----------------------------------------------------------------------------------------------

size_t Session::final_floats() const {
  const Shape& s = model_->shape;
  return static_cast<size_t>(s.n_streams) * (static_cast<size_t>(s.hidden) + 1);
}

void Session::keep_final(int64_t n) {
  const Shape& s = model_->shape;
  const int64_t stream = int64_t{s.n_streams} * s.hidden;
  final_.resize(final_floats());
  std::memcpy(final_.data(), t_.stream + (n - 1) * stream, static_cast<size_t>(stream) * sizeof(float));
  std::memcpy(final_.data() + stream, t_.mix + (n - 1) * s.n_streams, static_cast<size_t>(s.n_streams) * sizeof(float));
  final_position_ = state_.position() + n;  // of the run that is about to be committed
}

bool Session::last_logits(float* out, Poll* poll) {
  if (state_.position() == 0 || final_position_ != state_.position()) return false;
  const Shape& s = model_->shape;
  const int64_t stream = int64_t{s.n_streams} * s.hidden;
  FlushSubnormals flush;
  reserve_scratch(1, 1);
  backend_->set_poll(poll);
  std::memcpy(t_.stream, final_.data(), static_cast<size_t>(stream) * sizeof(float));
  std::memcpy(t_.mix, final_.data() + stream, static_cast<size_t>(s.n_streams) * sizeof(float));
  head(1, 1, nullptr);
  backend_->wait();
  take_logits(1, out);
  return true;
}

// ---- frontiers (docs/formats-store.md) ----------------------------------------------------------------------------

namespace {

struct FrontierHeader {
  uint32_t version, kind;
  uint64_t position;
  uint32_t n_layers, window, window_row_bytes, head_dim;
  uint32_t n_sources, final_floats, drafter_bytes, zero[5];
};
static_assert(sizeof(FrontierHeader) == 64, "as documented");

constexpr uint32_t kFull = 1;

}  // namespace

std::vector<uint8_t> Session::export_frontier() const {
  const Shape& s = model_->shape;
  const size_t window = state_.window_bytes(state_.position());
  const bool known = final_position_ == state_.position();
  const size_t floats = known ? final_floats() : 0;
  FrontierHeader h{};
  h.version = 1;
  h.kind = kFull;
  h.position = static_cast<uint64_t>(state_.position());
  h.n_layers = static_cast<uint32_t>(s.n_layers);
  h.window = static_cast<uint32_t>(s.window);
  h.window_row_bytes = static_cast<uint32_t>(s.window_row_bytes());
  h.head_dim = static_cast<uint32_t>(s.head_dim);
  h.n_sources = static_cast<uint32_t>(s.n_sources());
  h.final_floats = static_cast<uint32_t>(floats);
  std::vector<uint8_t> out(sizeof h + window + floats * sizeof(float));
  std::memcpy(out.data(), &h, sizeof h);
  state_.export_window(out.data() + sizeof h);
  std::memcpy(out.data() + sizeof h + window, final_.data(), floats * sizeof(float));
  return out;
}

void Session::import_frontier(const State::Reader& read, size_t bytes) {
  const Shape& s = model_->shape;
  FrontierHeader h{};
  const auto refuse = [&](const std::string& what) { throw StoreError("[frontier] " + what + "; it is not used"); };
  if (bytes < sizeof h) refuse("expected at least " + std::to_string(sizeof h) + " bytes, got " + std::to_string(bytes));
  read(reinterpret_cast<uint8_t*>(&h), sizeof h);
  if (h.version != 1 || h.kind != kFull)
    refuse("expected version 1 and kind 1 (full), got version " + std::to_string(h.version) + ", kind " + std::to_string(h.kind));
  if (h.position != static_cast<uint64_t>(state_.position()))
    refuse("it is for position " + std::to_string(h.position) + ", the state is at " + std::to_string(state_.position()));
  if (h.n_layers != static_cast<uint32_t>(s.n_layers) || h.window != static_cast<uint32_t>(s.window) ||
      h.window_row_bytes != static_cast<uint32_t>(s.window_row_bytes()) ||
      h.head_dim != static_cast<uint32_t>(s.head_dim) || h.n_sources != static_cast<uint32_t>(s.n_sources()))
    refuse("it belongs to a model of another shape");
  if (h.final_floats != 0 && h.final_floats != final_floats()) refuse("its last row has the wrong length");
  const size_t floats = h.final_floats;
  const size_t want = sizeof h + state_.window_bytes(state_.position()) + floats * sizeof(float) + h.drafter_bytes;
  if (bytes != want) refuse("expected " + std::to_string(want) + " bytes, got " + std::to_string(bytes));
  if (h.drafter_bytes != 0) refuse("it has drafter state, which this version does not know");
  final_position_ = -1;
  state_.import_window(read);
  final_.resize(final_floats());
  if (floats > 0) read(reinterpret_cast<uint8_t*>(final_.data()), floats * sizeof(float));
  final_known_ = floats > 0;
}

void Session::import_frontier(const uint8_t* data, size_t bytes) {
  import_frontier(
      [&](uint8_t* to, size_t n) {
        std::memcpy(to, data, n);
        data += n;
      },
      bytes);
  accept_frontier();
}

void Session::read_frontier(int fd, int64_t offset, size_t bytes, uint64_t sum) {
  Xxh64 found;
  import_frontier(
      [&](uint8_t* to, size_t n) {
        read_all(fd, offset, to, n);
        offset += static_cast<int64_t>(n);
        found.add(to, n);
      },
      bytes);
  if (found.value() != sum) throw StoreError("[frontier] the payload is damaged (checksum); it is not used");
  accept_frontier();
}

void Session::accept_frontier() {
  state_.window_complete();
  if (drafter_) drafter_->restart();
  if (final_known_) final_position_ = state_.position();
}

}  // namespace ds4
