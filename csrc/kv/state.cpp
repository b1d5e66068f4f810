#include "kv/state.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include "base/error.h"

namespace ds4 {

namespace {

constexpr int64_t kPendingRows = 64;  // unpooled rows kept for short truncations, per ratio-2 source

int64_t ring_rows(const Shape& s, int64_t context, int64_t retain, int64_t chunk) {
  return std::min(context, retain + s.window + chunk);
}

uint64_t next_id() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

int64_t aligned(int64_t bytes) { return (bytes + 4095) & ~int64_t{4095}; }

int64_t entries(const Shape& s, int source, int64_t position) { return position / s.ratio[s.source_layer[source]]; }

}  // namespace

CacheBytes cache_bytes(const Shape& s, int64_t context, int64_t retain, int64_t chunk, int extra_windows) {
  CacheBytes b;
  b.window = (s.n_layers + extra_windows) * aligned(ring_rows(s, context, retain, chunk) * s.window_row_bytes());
  for (int i = 0; i < s.n_sources(); ++i) {
    const int64_t n = entries(s, i, context);
    b.compressed += aligned(n * s.compressed_row_bytes()) + aligned(n * s.index_row_bytes());
    b.pending += aligned(kPendingRows * 2 * s.head_dim * static_cast<int64_t>(sizeof(float)));
  }
  return b;
}

namespace {

size_t total(const CacheBytes& b) { return static_cast<size_t>(b.window + b.compressed + b.pending); }

}  // namespace

State::State(const Shape& shape, Backend& backend, int64_t context, int64_t retain, int64_t chunk, int extra_windows)
    : shape_(shape),
      id_(next_id()),
      context_(context),
      ring_(ring_rows(shape, context, retain, chunk)),
      arena_(backend, total(cache_bytes(shape, context, retain, chunk, extra_windows))) {
  kept_.resize(static_cast<size_t>(shape.n_layers));
  lay_out(shape.n_layers + extra_windows);
}

State::State(const State& parent, Backend& backend)
    : shape_(parent.shape_),
      id_(next_id()),
      context_(parent.context_),
      ring_(parent.ring_),
      arena_(backend, parent.arena_),
      tokens_(parent.tokens_),
      classes_(parent.classes_),
      kept_(parent.kept_),
      extra_low_(parent.extra_low_),
      pending_low_(parent.pending_low_) {
  lay_out(parent.n_windows());
}

void State::lay_out(int n_windows) {
  uint8_t* at = arena_.base();
  const auto take = [&](int64_t bytes) {
    uint8_t* p = at;
    at += aligned(bytes);
    return p;
  };
  for (int l = 0; l < n_windows; ++l) windows_.push_back(take(ring_ * shape_.window_row_bytes()));
  for (int i = 0; i < shape_.n_sources(); ++i) {
    const int64_t n = entries(shape_, i, context_);
    compressed_.push_back(take(n * shape_.compressed_row_bytes()));
    index_.push_back(take(n * shape_.index_row_bytes()));
    pending_.push_back(take(kPendingRows * 2 * shape_.head_dim * static_cast<int64_t>(sizeof(float))));
  }
}

RowRing State::window(int layer) const { return {windows_[layer], ring_, shape_.window_row_bytes()}; }

RowRing State::pending(int source) const {
  return {pending_[source], kPendingRows, 2 * shape_.head_dim * static_cast<int>(sizeof(float))};
}

int64_t State::window_first(int64_t position) const { return std::max<int64_t>(0, position - shape_.window + 1); }

// One row more than the next token needs: a draft reads whole windows.
int64_t State::mark_first(int64_t position) const { return std::max<int64_t>(0, position - shape_.window); }

int64_t State::highest_low() const {
  int64_t low = 0;
  for (const Kept& k : kept_) low = std::max(low, k.low);
  return low;
}

int64_t State::lowest() const {
  // A position p needs the rows from p - window + 1 on.
  const int64_t low = highest_low();
  return low == 0 ? 0 : std::min(position(), low + shape_.window - 1);
}

bool State::window_kept(int64_t position, int n_layers) const {
  for (int l = 0; l < n_layers; ++l)
    if (kept_[l].low > window_first(position)) return false;
  return true;
}

std::vector<int64_t> State::window_low(int64_t position) const {
  std::vector<int64_t> low;
  for (const Kept& k : kept_) low.push_back(std::min(k.low, position));
  return low;
}

void State::keep_nothing(int64_t position) {
  for (Kept& k : kept_) k = {position, position};
}

void State::save_window(Mark& mark) const {
  const int64_t first = mark_first(mark.position), n = mark.position - first;
  const int rb = shape_.window_row_bytes();
  mark.window.resize(static_cast<size_t>(n_windows() * n * rb));
  uint8_t* out = mark.window.data();
  for (int l = 0; l < n_windows(); ++l)
    for (int64_t p = first; p < mark.position; ++p, out += rb) std::memcpy(out, window(l).row(p), rb);
}

// Marks that need window rows below `low`, which are about to go.
void State::save_marks_above(int64_t low) {
  auto keep = marks_.begin();
  for (auto& weak : marks_) {
    const auto mark = weak.lock();
    if (!mark || !mark->valid) continue;
    if (mark->window.empty() && mark->position > 0 && mark_first(mark->position) < low) save_window(*mark);
    *keep++ = weak;
  }
  marks_.erase(keep, marks_.end());
}

void State::own_ring(const RowRing& ring, int64_t first, int64_t n) {
  if (n >= ring.capacity) return arena_.own(ring.base, static_cast<size_t>(ring.capacity * ring.row_bytes));
  const int64_t before_end = std::min(n, ring.capacity - first % ring.capacity);
  arena_.own(ring.row(first), static_cast<size_t>(before_end * ring.row_bytes));
  arena_.own(ring.base, static_cast<size_t>((n - before_end) * ring.row_bytes));
}

// Large pages for the entries of tokens 0 .. end - 1, as far as they fill some.
void State::join_pages(int64_t end) {
  for (const Section& s : sections(0, end)) arena_.join(s.data, s.bytes);
}

void State::prepare(int64_t n, const std::vector<int64_t>& window_from, int64_t entries_from) {
  const int64_t begin = position(), end = begin + n;
  kept_before_ = kept_;
  pending_before_ = pending_low_;
  auto after = kept_;
  int64_t highest = 0;
  for (size_t l = 0; l < after.size(); ++l) {
    Kept& k = after[l];
    const int64_t first = std::clamp(window_from[l], begin, end);
    if (first > k.end) k.low = first;  // a gap: the rows in front of it are of no use
    k.end = std::max(k.end, end);
    k.low = std::max(k.low, k.end - ring_);
    highest = std::max(highest, k.low);
  }
  save_marks_above(highest);
  kept_ = after;
  for (size_t l = 0; l < kept_.size(); ++l) {
    const int64_t first = std::clamp(window_from[l], begin, end);
    own_ring(window(static_cast<int>(l)), first, end - first);
  }
  const int64_t first = std::clamp(entries_from, begin, end);
  if (first == end) return;
  pending_low_ = std::max(pending_low_, end - kPendingRows);
  const int64_t open = std::max<int64_t>(0, first - 1);
  for (int i = 0; i < shape_.n_sources(); ++i) own_ring(pending(i), open, end - open);
  join_pages(first);
  for (const Section& s : sections(first, end)) arena_.own(s.data, s.bytes);
}

void State::undo_prepare(int64_t n) {
  for (size_t l = 0; l < kept_.size(); ++l) {  // rows that the run may have overwritten
    kept_[l].end = kept_before_[l].end;
    kept_[l].low = std::min(kept_[l].end, std::max(kept_before_[l].low, position() + n - ring_));
  }
  pending_low_ = std::max(pending_before_, position() % 2 == 1 ? position() - 1 : position());
}

void State::prepare_extra(int64_t first, int64_t n) {
  extra_low_ = std::max(extra_low_, first + n - ring_);
  for (int l = shape_.n_layers; l < n_windows(); ++l) own_ring(window(l), first, n);
}

void State::commit(const int32_t* tokens, int64_t n, NumericClass c) {
  // Room first, so that the two stay of one length; doubled, or each step would copy all there is.
  const size_t need = tokens_.size() + static_cast<size_t>(n);
  if (classes_.capacity() < need) classes_.reserve(std::max(need, 2 * classes_.capacity()));
  tokens_.insert(tokens_.end(), tokens, tokens + n);
  classes_.insert(classes_.end(), static_cast<size_t>(n), c);
}

void State::keep_tokens(int64_t n) {
  tokens_.resize(static_cast<size_t>(n));
  classes_.resize(static_cast<size_t>(n), NumericClass::canonical);
}

std::shared_ptr<Mark> State::mark() {
  auto mark = std::make_shared<Mark>();
  mark->position = position();
  mark->state = id_;
  mark->low = highest_low();
  mark->extra_low = extra_low();
  if (position() % 2 == 1) {
    const size_t width = static_cast<size_t>(2 * shape_.head_dim);
    mark->pending.resize(width * shape_.n_sources());
    for (int i = 0; i < shape_.n_sources(); ++i)
      std::memcpy(mark->pending.data() + i * width, pending(i).row(position() - 1), width * sizeof(float));
  }
  marks_.push_back(mark);
  return mark;
}

bool State::pending_kept(int64_t position) const {
  if (position % 2 == 0) return true;
  for (int i = 0; i < shape_.n_sources(); ++i)
    if (shape_.ratio[shape_.source_layer[i]] == 2) return position - 1 >= pending_low_;
  return true;
}

void State::forget_marks_above(int64_t position) {
  for (auto& weak : marks_)
    if (const auto mark = weak.lock(); mark && mark->position > position) mark->valid = false;
}

void State::go_back(int64_t position) {
  if (position < 0 || position > this->position())
    throw StateError("[truncate] expected a position between 0 and " + std::to_string(this->position()) + ", got " +
                     std::to_string(position));
  forget_marks_above(position);
  for (Kept& k : kept_) k = {std::min(k.low, position), std::min(k.end, position)};
  extra_low_ = std::min(extra_low_, position);
  keep_tokens(position);
  pending_low_ = std::min(pending_low_, position);  // what follows is written anew
}

bool State::reaches(int64_t position) const {
  if (position < 0 || position > this->position()) return false;
  const int64_t start = position - (pending_kept(position) ? 0 : 1);
  return start == 0 || window_kept(start, shape_.n_layers);
}

void State::truncate(const Mark& mark) {
  if (mark.state != id_) throw StateError("[truncate] this mark belongs to another session; forks do not share marks");
  if (!mark.valid || mark.position > position())
    throw StateError("[truncate] the mark at position " + std::to_string(mark.position) +
                     " is no longer valid: the session went back below it");
  for (Kept& k : kept_) k = {std::min(k.low, mark.position), std::min(k.end, mark.position)};
  if (!mark.window.empty()) {
    const int64_t first = mark_first(mark.position);
    const int rb = shape_.window_row_bytes();
    const uint8_t* in = mark.window.data();
    for (int l = 0; l < n_windows(); ++l) own_ring(window(l), first, mark.position - first);
    for (int l = 0; l < n_windows(); ++l)
      for (int64_t p = first; p < mark.position; ++p, in += rb) std::memcpy(window(l).row(p), in, rb);
    // Only the mark's own rows are certain now.
    for (Kept& k : kept_) k = {std::max(first, mark.low), mark.position};
  }
  const size_t width = static_cast<size_t>(2 * shape_.head_dim);
  for (int i = 0; i < shape_.n_sources() && !mark.pending.empty(); ++i) {
    own_ring(pending(i), mark.position - 1, 1);
    std::memcpy(pending(i).row(mark.position - 1), mark.pending.data() + i * width, width * sizeof(float));
  }
  pending_low_ = mark.pending.empty() ? mark.position : mark.position - 1;
  forget_marks_above(mark.position);
  extra_low_ = std::min(mark.extra_low, mark.position);
  keep_tokens(mark.position);
}

std::vector<uint8_t> State::live_bytes() const {
  std::vector<uint8_t> out;
  const auto put = [&](const void* p, size_t n) {
    const auto* b = static_cast<const uint8_t*>(p);
    out.insert(out.end(), b, b + n);
  };
  put(tokens_.data(), tokens_.size() * sizeof(int32_t));
  put(classes_.data(), classes_.size());
  for (int l = 0; l < shape_.n_layers; ++l)
    for (int64_t p = window_first(position()); p < position(); ++p) put(window(l).row(p), shape_.window_row_bytes());
  for (int i = 0; i < shape_.n_sources(); ++i) {
    const int64_t n = entries(shape_, i, position());
    put(compressed_[i], static_cast<size_t>(n * shape_.compressed_row_bytes()));
    put(index_[i], static_cast<size_t>(n * shape_.index_row_bytes()));
    if (shape_.ratio[shape_.source_layer[i]] == 2 && position() % 2 == 1)
      put(pending(i).row(position() - 1), static_cast<size_t>(pending(i).row_bytes));
  }
  return out;
}

namespace {

// Random codes, then random scales around a power of two: n rows of codes + groups bytes. Scale bytes spread over
// `spread` values from `low` on.
void random_rows(uint8_t* rows, int64_t n, int codes, int groups, uint8_t low, uint8_t spread, uint8_t mask, uint64_t& s) {
  const auto next = [&s] {
    s ^= s << 13;
    s ^= s >> 7;
    s ^= s << 17;
    return s;
  };
  for (int64_t r = 0; r < n; ++r) {
    for (int i = 0; i < codes; i += 8) {
      const uint64_t v = next() & (0x0101010101010101ull * mask);
      std::memcpy(rows + i, &v, static_cast<size_t>(std::min(8, codes - i)));
    }
    for (int g = 0; g < groups; ++g) rows[codes + g] = static_cast<uint8_t>(low + next() % spread);
    rows += codes + groups;
  }
}

}  // namespace

void State::fill_for_benchmark(int64_t position, uint64_t seed) {
  uint64_t s = seed * 0x9e3779b97f4a7c15ull | 1;
  keep_tokens(position);
  for (auto& t : tokens_) {
    s ^= s << 13;
    s ^= s >> 7;
    s ^= s << 17;
    t = static_cast<int32_t>(s % static_cast<uint64_t>(shape_.vocab));
  }
  const int hd = shape_.head_dim, id = shape_.index_dim;
  for (int l = 0; l < shape_.n_layers; ++l) own_ring(window(l), 0, std::min(position, ring_));
  for (const Section& rows : sections(0, position)) arena_.own(rows.data, rows.bytes);
  for (int l = 0; l < shape_.n_layers; ++l)  // e4m3 codes without NaN (0xb7: at most 60), scales around 2^-6
    random_rows(windows_[l], std::min(position, ring_), hd, hd / 32, 120, 3, 0xb7, s);
  for (int i = 0; i < shape_.n_sources(); ++i) {
    const int64_t n = entries(shape_, i, position);
    random_rows(compressed_[i], n, hd / 2, hd / 16, 40, 8, 0xff, s);  // e4m3 scales around 1/4
    random_rows(index_[i], n, id / 2, id / 32, 124, 4, 0xff, s);      // e8m0 scales around 1/4
  }
  for (Kept& k : kept_) k = {std::max<int64_t>(0, position - ring_), position};
  pending_low_ = position;
}

}  // namespace ds4
