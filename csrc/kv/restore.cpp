// Rows and windows of a state as bytes, and states put together from them.
#include <algorithm>
#include <cstring>
#include <string>

#include "base/error.h"
#include "kv/state.h"

namespace ds4 {

// ---- replay ----------------------------------------------------------------------------------------------------

void State::begin_replay(int64_t start, const std::vector<char>& kept) {
  save_marks_above(position() + 1);  // slots of their rows may be written
  for (size_t l = 0; l < kept_.size(); ++l)
    if (!kept[l]) kept_[l] = {start, start};
  keep_tokens(start);
}

void State::abandon_replay(const std::vector<int32_t>& tokens, const std::vector<NumericClass>& classes, const std::vector<char>& kept) {
  tokens_ = tokens;
  classes_ = classes;
  for (size_t l = 0; l < kept_.size(); ++l)
    if (!kept[l]) kept_[l] = {position(), position()};
}

// ---- rows ------------------------------------------------------------------------------------------------------

std::vector<Section> State::sections(int64_t begin, int64_t end) const {
  std::vector<Section> out;
  for (int i = 0; i < shape_.n_sources(); ++i) {
    const int ratio = shape_.ratio[shape_.source_layer[i]];
    const int64_t first = begin / ratio, n = end / ratio - first;
    const int64_t c = shape_.compressed_row_bytes(), x = shape_.index_row_bytes();
    out.push_back({compressed_[i] + first * c, static_cast<size_t>(n * c)});
    out.push_back({index_[i] + first * x, static_cast<size_t>(n * x)});
  }
  return out;
}

size_t State::rows_bytes(int64_t begin, int64_t end) const {
  size_t n = 0;
  for (const Section& s : sections(begin, end)) n += s.bytes;
  return n;
}

void State::export_rows(int64_t begin, int64_t end, uint8_t* out) const {
  if (begin < 0 || end < begin || end > position())
    throw StateError("[export] expected positions within 0 .. " + std::to_string(position()) + ", got " +
                     std::to_string(begin) + " .. " + std::to_string(end));
  for (const Section& s : sections(begin, end)) {
    std::memcpy(out, s.data, s.bytes);
    out += s.bytes;
  }
}

void State::begin_restore(int64_t keep) {
  if (keep < 0 || keep > position())
    throw StateError("[restore] expected to keep 0 .. " + std::to_string(position()) + " tokens, got " + std::to_string(keep));
  forget_marks_above(keep);
  save_marks_above(keep + 1);
  keep_tokens(keep);
  keep_nothing(keep);
  pending_low_ = keep;
  imported_ = held_ = keep;
  large_.clear();
}

void State::expect_rows(int64_t end) {
  if (end > imported_ && end <= context_)
    for (const Section& s : sections(imported_, end)) arena_.plan_large_pages(s.data, s.bytes, &large_);
}

void State::take_large_pages() {
  for (const Arena::LargePages& pages : large_) arena_.take(pages);
  large_.clear();
}

std::vector<Incoming> State::incoming(int64_t begin, int64_t end) const {
  std::vector<Incoming> out;
  const int64_t held = std::clamp(held_, begin, end);
  const auto all = sections(begin, end), ours = sections(begin, held);
  for (size_t i = 0; i < all.size(); ++i) out.push_back({all[i], ours[i].bytes});
  return out;
}

std::vector<Incoming> State::import_target(int64_t begin, int64_t end) {
  if (begin < 0 || begin > imported_ || end <= begin || end > context_)
    throw StateError("[restore] rows of positions " + std::to_string(begin) + " .. " + std::to_string(end) +
                     " do not follow the first " + std::to_string(imported_) + " of a context of " +
                     std::to_string(context_));
  auto out = incoming(begin, end);
  for (const Incoming& in : out) arena_.own(in.to.data + in.held, in.to.bytes - in.held);
  return out;
}

void State::import_rows(int64_t begin, int64_t end, const uint8_t* data, size_t bytes) {
  take_large_pages();
  const auto target = import_target(begin, end);
  if (bytes != rows_bytes(begin, end))
    throw StoreError("[restore] rows of positions " + std::to_string(begin) + " .. " + std::to_string(end) + " take " +
                     std::to_string(rows_bytes(begin, end)) + " bytes, got " + std::to_string(bytes));
  for (const Incoming& in : target) {
    std::memcpy(in.to.data + in.held, data + in.held, in.to.bytes - in.held);
    data += in.to.bytes;
  }
  imported_ = std::max(imported_, end);
}

void State::finish_restore(const int32_t* tokens, const NumericClass* classes, int64_t n) {
  if (n < position() || n > imported_ || !std::equal(tokens_.begin(), tokens_.end(), tokens) ||
      !std::equal(classes_.begin(), classes_.end(), classes))
    throw StateError("[restore] " + std::to_string(n) + " tokens do not go on after the " + std::to_string(position()) +
                     " that were kept, or there are rows of " + std::to_string(imported_) + " only");
  tokens_.assign(tokens, tokens + n);
  classes_.assign(classes, classes + n);
  keep_nothing(n);
  pending_low_ = n;
}

// ---- windows ---------------------------------------------------------------------------------------------------

size_t State::window_bytes(int64_t position, int n_layers) const {
  size_t n = static_cast<size_t>(n_layers * (position - window_first(position)) * shape_.window_row_bytes());
  if (position % 2 == 0) return n;
  for (const int l : shape_.source_layer)
    if (shape_.ratio[l] == 2) n += static_cast<size_t>(2 * shape_.head_dim) * sizeof(float);
  return n;
}

void State::export_window(uint8_t* out, int n_layers) const {
  if (!ready_at(position(), n_layers)) throw StateError("[export] the window rows at position " + std::to_string(position()) + " are not there");
  for (int l = 0; l < n_layers; ++l) {
    const RowRing ring = window(l);
    for (int64_t p = window_first(position()); p < position(); ++p, out += ring.row_bytes)
      std::memcpy(out, ring.row(p), static_cast<size_t>(ring.row_bytes));
  }
  if (position() % 2 == 0) return;
  for (int i = 0; i < shape_.n_sources(); ++i) {
    if (shape_.ratio[shape_.source_layer[i]] != 2) continue;
    const RowRing ring = pending(i);
    std::memcpy(out, ring.row(position() - 1), static_cast<size_t>(ring.row_bytes));
    out += ring.row_bytes;
  }
}

void State::import_window(const Reader& read, int n_layers) {
  const int64_t at = position(), first = window_first(at), n = at - first;
  save_marks_above(at + 1);
  keep_nothing(at);  // not ready, should reading fail
  pending_low_ = at;
  for (int l = 0; l < n_layers; ++l) {
    const RowRing ring = window(l);
    own_ring(ring, first, n);
    for (int64_t p = first; p < at;) {  // up to the end of the ring at once
      const int64_t run = std::min(at - p, ring.capacity - p % ring.capacity);
      read(ring.row(p), static_cast<size_t>(run * ring.row_bytes));
      p += run;
    }
  }
  for (int i = 0; i < shape_.n_sources() && at % 2 == 1; ++i) {
    if (shape_.ratio[shape_.source_layer[i]] != 2) continue;
    const RowRing ring = pending(i);
    own_ring(ring, at - 1, 1);
    read(ring.row(at - 1), static_cast<size_t>(ring.row_bytes));
  }
}

void State::window_complete(int n_layers) {
  for (int l = 0; l < n_layers; ++l) kept_[l].low = window_first(position());
  pending_low_ = position() % 2 == 1 ? position() - 1 : position();
}

}  // namespace ds4
