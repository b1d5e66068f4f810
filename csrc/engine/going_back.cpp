// Rewinding, forking, and frontiers: everything by which a session gets to a state without running all of its tokens.
#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "engine/session.h"
#include "kv/xxh64.h"

namespace ds4 {

// ---- what has to be run ---------------------------------------------------------------------------------------

// A state of `position` tokens that will be prefilled up to `end` with the last logits aim.
Aim Session::aim_at(int64_t position, int64_t end) const {
  Aim w;
  w.position = position;
  w.end = end;
  w.logits_from = every_row_ && end > position ? position : end - 1;
  w.window_from = std::max<int64_t>(0, end - model_->shape.window + 1);
  w.entries_from = state_.pending_kept(position) ? position : position - 1;
  return w;
}

Aim Session::aim_of_run(int64_t n, bool every_row) const {
  Aim w = aim_at(state_.position(), state_.position() + n);
  if (every_row) w.logits_from = w.position;
  return w;
}

namespace {

// One row more than that, since a draft reads whole windows.
Aim with_slack(Aim w, int64_t slack) {
  w.window_from = std::max<int64_t>(0, w.window_from - 1 - slack);
  return w;
}

}  // namespace

// Of a run whose first tokens need nothing that is not there: slack as far as it costs no replay.
Cone Session::run_cone(const Aim& aim) const {
  const auto low = state_.window_low(aim.position);
  Cone cone = cone_of(model_->shape, with_slack(aim, slack_), low);
  cut_at(model_->shape, aim.position, low, &cone);
  return cone;
}

Cone Session::replay_cone(const Aim& aim, const std::vector<int64_t>& low) const {
  const Shape& s = model_->shape;
  Cone cone = cone_of(s, aim, low);
  // Nothing to replay, or only a token whose open pair is gone.
  if (std::all_of(cone.kept.begin(), cone.kept.end(), [](char kept) { return kept != 0; })) return cone;
  if (cone.start() >= aim.position) return cone;
  return cone_of(s, with_slack(aim, slack_), low);
}

int64_t Session::bring(const Aim& aim, Poll* poll) {
  const Cone cone = replay_cone(aim, state_.window_low(aim.position));
  if (cone.start() >= aim.position) return 0;
  replay(cone, poll);
  return aim.position - cone.start();
}

int64_t Session::rewind_start(int64_t position, int64_t end) const {
  if (end <= position && state_.ready_at(position, model_->shape.n_layers)) return position;
  const Aim aim = aim_at(position, std::max(position, end));
  return std::min(position, replay_cone(aim, state_.window_low(position)).start());
}

int64_t Session::restore_start(int64_t position, int64_t end, Restored from) const {
  const Shape& s = model_->shape;
  Aim aim = aim_at(position, std::max(position, end));
  aim.entries_from = from == Restored::rows && position % 2 == 1 ? position - 1 : position;
  std::vector<int64_t> low(static_cast<size_t>(s.n_layers), position);
  if (from == Restored::encoder)
    std::fill_n(low.begin(), encoder_layers(s), std::max<int64_t>(0, position - s.window + 1));
  return std::min(position, replay_cone(aim, low).start());
}

int64_t Session::decoder_cone() const {
  const Shape& s = model_->shape;
  return int64_t{s.n_layers - encoder_layers(s)} * (s.window - 1) + 1 + slack_;
}

// ---- getting there ---------------------------------------------------------------------------------------------

int64_t Session::truncate(int64_t position, Poll* poll) {
  if (position >= 0 && position <= state_.position() && !state_.reaches(position))
    throw StateError("[truncate] the window rows for position " + std::to_string(position) + " are gone; the lowest " +
                     "position that this session can go back to for nothing is " + std::to_string(state_.lowest()) +
                     " (rewind there, or set a mark; retain= and decoder= say how far window rows are kept)");
  return rewind(position, 0, poll);
}

void Session::truncate(const Mark& mark) {
  state_.truncate(mark);
  if (final_position_ != mark.position) final_position_ = -1;
  if (drafter_) drafter_->follow();
}

int64_t Session::rewind(int64_t position, int64_t end, Poll* poll) {
  faults_.at(FaultPoint::rollback_before);
  state_.go_back(position);
  faults_.at(FaultPoint::rollback_after);
  if (drafter_) drafter_->follow();
  if (final_position_ != position) final_position_ = -1;
  return complete(end, poll);
}

int64_t Session::complete(int64_t end, Poll* poll) {
  const int64_t position = state_.position();
  if (end <= position && state_.ready()) return 0;
  return bring(aim_at(position, std::max(position, end)), poll);
}

void Session::replay(const Cone& cone, Poll* poll) {
  const std::vector<int32_t> tokens = state_.tokens();
  const std::vector<NumericClass> classes = state_.classes();
  const int64_t position = state_.position();
  // A drafter that knows the rows in front of the position keeps them; else it takes what passes by.
  watching_ = drafter_ != nullptr && drafter_->n_context() < std::min<int64_t>(position, model_->shape.window);
  replaying_ = true;
  state_.begin_replay(cone.start(), cone.kept);
  if (watching_) drafter_->restart();
  try {
    for (int64_t p = cone.start(), n = 0; p < position; p += n) {
      // A run is of one numeric class: the one that its tokens were computed in.
      const auto first = classes.begin() + p, end = first + std::min(chunk_, position - p);
      n = std::find_if(first, end, [&](NumericClass c) { return c != *first; }) - first;
      run_rows(&tokens[static_cast<size_t>(p)], n, cone, Logits::none, nullptr, poll, nullptr, *first);
    }
  } catch (...) {
    state_.abandon_replay(tokens, classes, cone.kept);
    if (watching_ && drafter_) drafter_->restart();
    replaying_ = false;
    watching_ = true;
    final_position_ = -1;
    throw;
  }
  state_.end_replay();
  replaying_ = false;
  watching_ = true;
}

std::shared_ptr<Mark> Session::mark(Poll* poll) {
  complete(0, poll);
  beside([](Drafter& d) { d.settle(nullptr, kDraftSlack); });
  return state_.mark();
}

Session::Session(const Session& parent, int)
    : model_(parent.model_),
      backend_(model_->make_backend()),
      state_(parent.state_, *backend_),
      chunk_(parent.chunk_),
      slack_(parent.slack_),
      every_row_(parent.every_row_),
      feed_(*model_, *backend_),
      final_(parent.final_),
      final_position_(parent.final_position_) {
  if (parent.drafter_ == nullptr) return;
  drafter_ = std::make_unique<Drafter>(parent.drafter_->shared_model(), state_, *backend_, faults_);
  state_.raise_extra_low(parent.state_.extra_low());  // its rows are there already
}

std::unique_ptr<Session> Session::fork() {
  beside([](Drafter& d) { d.settle(nullptr, kDraftSlack); });
  return std::unique_ptr<Session>(new Session(*this, 0));
}

void Session::begin_restore(int64_t keep) {
  state_.begin_restore(keep);
  final_position_ = -1;
  if (drafter_) drafter_->restart();
}

void Session::finish_restore(const int32_t* tokens, const NumericClass* classes, int64_t n) {
  state_.finish_restore(tokens, classes, n);
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

constexpr uint32_t kFull = 1, kEncoder = 2;

}  // namespace

std::vector<uint8_t> Session::export_frontier(bool encoder) {
  const Shape& s = model_->shape;
  std::vector<uint8_t> context;
  if (!encoder)
    beside([&](Drafter& d) {
      d.settle(nullptr, 0);
      context = d.export_context();
    });
  const int layers = frontier_layers(encoder);
  const size_t window = state_.window_bytes(state_.position(), layers);
  const bool known = !encoder && final_position_ == state_.position();
  const size_t floats = known ? final_floats() : 0;
  FrontierHeader h{};
  h.version = 1;
  h.kind = encoder ? kEncoder : kFull;
  h.position = static_cast<uint64_t>(state_.position());
  h.n_layers = static_cast<uint32_t>(layers);
  h.window = static_cast<uint32_t>(s.window);
  h.window_row_bytes = static_cast<uint32_t>(s.window_row_bytes());
  h.head_dim = static_cast<uint32_t>(s.head_dim);
  h.n_sources = static_cast<uint32_t>(s.n_sources());
  h.final_floats = static_cast<uint32_t>(floats);
  h.drafter_bytes = static_cast<uint32_t>(context.size());
  std::vector<uint8_t> out(sizeof h + window + floats * sizeof(float));
  std::memcpy(out.data(), &h, sizeof h);
  state_.export_window(out.data() + sizeof h, layers);
  if (floats > 0) std::memcpy(out.data() + sizeof h + window, final_.data(), floats * sizeof(float));
  out.insert(out.end(), context.begin(), context.end());
  return out;
}

void Session::import_frontier(const State::Reader& read, size_t bytes) {
  const Shape& s = model_->shape;
  FrontierHeader h{};
  const auto refuse = [&](const std::string& what) { throw StoreError("[frontier] " + what + "; it is not used"); };
  if (bytes < sizeof h) refuse("expected at least " + std::to_string(sizeof h) + " bytes, got " + std::to_string(bytes));
  read(reinterpret_cast<uint8_t*>(&h), sizeof h);
  if (h.version != 1 || (h.kind != kFull && h.kind != kEncoder))
    refuse("expected version 1 and kind 1 (full) or 2 (encoder), got version " + std::to_string(h.version) + ", kind " +
           std::to_string(h.kind));
  if (h.position != static_cast<uint64_t>(state_.position()))
    refuse("it is for position " + std::to_string(h.position) + ", the state is at " + std::to_string(state_.position()));
  frontier_layers_ = frontier_layers(h.kind == kEncoder);
  if (h.n_layers != static_cast<uint32_t>(frontier_layers_) || h.window != static_cast<uint32_t>(s.window) ||
      h.window_row_bytes != static_cast<uint32_t>(s.window_row_bytes()) ||
      h.head_dim != static_cast<uint32_t>(s.head_dim) || h.n_sources != static_cast<uint32_t>(s.n_sources()))
    refuse("it belongs to a model of another shape");
  if (h.final_floats != 0 && h.final_floats != final_floats()) refuse("its last row has the wrong length");
  const size_t floats = h.final_floats;
  const size_t want =
      sizeof h + state_.window_bytes(state_.position(), frontier_layers_) + floats * sizeof(float) + h.drafter_bytes;
  if (bytes != want) refuse("expected " + std::to_string(want) + " bytes, got " + std::to_string(bytes));
  final_position_ = -1;
  state_.import_window(read, frontier_layers_);
  final_.resize(final_floats());
  if (floats > 0) read(reinterpret_cast<uint8_t*>(final_.data()), floats * sizeof(float));
  final_known_ = floats > 0;
  draft_rows_ = 0;
  if (h.drafter_bytes == 0) return;
  if (drafter_) {
    draft_rows_ = drafter_->import_context(read, h.drafter_bytes);
  } else {
    std::vector<uint8_t> left(h.drafter_bytes);
    read(left.data(), left.size());
  }
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

namespace {

// A file read piece by piece from its beginning, and its sum.
class Pieces {
 public:
  Pieces(int fd, int64_t offset, size_t bytes) : fd_(fd), offset_(offset), left_(bytes), piece_(std::min(kPiece, bytes)) {}

  template <class Put>
  void read(uint8_t* to, size_t n, Put put) {
    while (n > 0) {
      if (at_ == end_) more();
      const size_t k = std::min(n, end_ - at_);
      put(to, piece_.data() + at_, k);
      to += k, n -= k, at_ += k;
    }
  }
  uint64_t sum() const { return sum_.value(); }

 private:
  static constexpr size_t kPiece = 128 << 10;

  void more() {
    if (left_ == 0) throw StoreError("[frontier] it has fewer bytes than it says; it is not used");
    at_ = 0;
    end_ = std::min(piece_.size(), left_);
    read_all(fd_, offset_, piece_.data(), end_);
    sum_.add(piece_.data(), end_);
    offset_ += static_cast<int64_t>(end_);
    left_ -= end_;
  }

  int fd_;
  int64_t offset_;
  size_t left_, at_ = 0, end_ = 0;
  std::vector<uint8_t> piece_;
  Xxh64 sum_;
};

}  // namespace

void Session::read_frontier(const FrontierSource& from) {
  Pieces file(from.fd, from.offset, from.bytes);
  import_frontier(
      [&](uint8_t* to, size_t n) {
        file.read(to, n, [&](uint8_t* a, const uint8_t* b, size_t k) { state_.put(a, b, k); });
      },
      from.bytes);
  if (file.sum() != from.sum) throw StoreError("[frontier] the payload is damaged (checksum); it is not used");
}

std::optional<BadSource> Session::read_pages(const std::vector<PageSource>& pages, const std::vector<int32_t>& tokens,
                                             const std::vector<NumericClass>& classes, const std::optional<FrontierSource>& frontier) {
  const int64_t keep = state_.position();
  std::string fault;
  state_.prepare_pages(pages);
  if (!tokens.empty()) finish_restore(tokens.data(), classes.data(), static_cast<int64_t>(tokens.size()));
  std::optional<BadSource> bad;
  try {
    bad = state_.read_pages(pages, [&] {
      if (!frontier) return;
      try {
        read_frontier(*frontier);
      } catch (const StoreError& error) {
        fault = error.what();
      }
    });
  } catch (...) {  // tokens without their rows must not stay
    begin_restore(keep);
    throw;
  }
  if (bad) {
    begin_restore(keep);
    return bad;
  }
  if (!fault.empty()) return BadSource{static_cast<int64_t>(pages.size()), fault};
  if (frontier) accept_frontier();
  return std::nullopt;
}

void Session::accept_frontier() {
  state_.window_complete(frontier_layers_);
  if (drafter_) drafter_->accept_context(draft_rows_);
  if (final_known_) final_position_ = state_.position();
}

}  // namespace ds4
