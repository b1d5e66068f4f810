#include "engine/cone.h"

#include <algorithm>

namespace ds4 {

namespace {

bool makes_entries(const Shape& s, int l) { return s.kv_source[l] >= 0 && s.source_layer[s.kv_source[l]] == l; }

}  // namespace

Cone cone_of(const Shape& s, const Aim& aim, const std::vector<int64_t>& low) {
  const int layers = s.n_layers;
  Cone c;
  c.stream.resize(static_cast<size_t>(layers) + 1);
  c.window.resize(static_cast<size_t>(layers));
  c.kept.resize(static_cast<size_t>(layers));
  c.entries = aim.entries_from;
  c.stream[layers] = std::min(aim.logits_from, aim.end);
  for (int l = layers - 1; l >= 0; --l) {
    const int64_t full = c.stream[l + 1];
    int64_t window = aim.window_from;
    if (full < aim.end) window = std::min(window, full - s.window + 1);
    window = std::max<int64_t>(0, window);
    c.kept[l] = low[l] <= window;
    if (c.kept[l]) window = std::max(window, aim.position);
    c.window[l] = std::min({window, full, aim.end});
    c.stream[l] = makes_entries(s, l) ? std::min(c.window[l], aim.entries_from) : c.window[l];
  }
  return c;
}

void cut_at(const Shape& s, int64_t position, const std::vector<int64_t>& low, Cone* cone) {
  int64_t first = position;  // of the streams that can be computed
  for (int l = 0; l <= s.n_layers; ++l) {
    cone->stream[l] = std::max(cone->stream[l], first);
    if (l == s.n_layers) break;
    cone->window[l] = std::max(cone->window[l], cone->stream[l]);
    // Window rows of this layer: those that are kept and those from `first` on, if they touch.
    const int64_t window = first == position ? low[l] : first;
    if (window > 0) first = std::max(first, window + s.window - 1);
  }
}

std::vector<LayerRows> rows_of(const Shape& s, const Cone& cone, int64_t position, int n) {
  const auto row = [&](int64_t p) { return static_cast<int>(std::clamp<int64_t>(p - position, 0, n)); };
  std::vector<LayerRows> rows;
  for (int l = 0; l < s.n_layers; ++l)
    rows.push_back({n, row(cone.stream[l]), row(cone.window[l]), row(cone.stream[l + 1]),
                    makes_entries(s, l) ? row(cone.entries) : n});
  return rows;
}

}  // namespace ds4
