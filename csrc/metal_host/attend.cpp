// attend, draft_attend: scores, then softmax and values; in batches of rows.
#include "attend.h"

#include <algorithm>
#include <cmath>

#include "metal_host/backend.h"
#include "metal_host/products.h"

namespace ds4::metal {

namespace {

constexpr int64_t kEnoughGroups = 128;  // threadgroups that occupy a large GPU

}  // namespace

// What both operations have, and where their rows come from.
struct AttendBuffers {
  const float* q;
  Argument window, more, selected, n_selected;
  const float* sink;
  Rope rope;
  float *o, *o_raw;
};

namespace {

AttendParams params_for(const Shape& s, int64_t position) {
  AttendParams p{};
  p.position = static_cast<uint32_t>(position);
  p.heads = static_cast<uint32_t>(s.n_heads);
  p.head_dim = static_cast<uint32_t>(s.head_dim);
  p.rope_dim = static_cast<uint32_t>(s.rope_dim);
  p.window = static_cast<uint32_t>(s.window);
  p.window_row_bytes = static_cast<uint32_t>(s.window_row_bytes());
  p.more_capacity = 1;
  p.scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
  return p;
}

}  // namespace

void MetalBackend::attend_rows(AttendParams p, const AttendBuffers& b, int64_t n, int64_t longest) {
  const int64_t heads = s_.n_heads, hd = s_.head_dim, angles = n * (s_.rope_dim / 2);
  const int64_t blocks = groups_of(longest, ATTEND_PLACES), per_row = heads * blocks * ATTEND_PLACES;
  const int64_t batch = std::clamp<int64_t>(kBatchBytes / (per_row * 4), 1, n);
  float* scores = temp<float>(Temp::attend_partials, batch * per_row);
  p.blocks = static_cast<uint32_t>(blocks);
  p.raw = b.o_raw != nullptr ? 1 : 0;
  for (int64_t i = 0; i < n; i += batch) {
    const int64_t rows = std::min(batch, n - i), head_groups = groups_of(heads, ATTEND_HEADS);
    p.first_row = static_cast<uint32_t>(i);
    encode("attend_scores", {}, p,
           {reads(b.q, n * heads * hd), b.window, b.more, b.selected, b.n_selected, writes(scores, rows * per_row)},
           {blocks, head_groups, rows}, ATTEND_THREADS, ATTEND_HEADS * static_cast<size_t>(hd) * sizeof(float));
    Constants narrow;
    narrow.flags = rows * head_groups * groups_of(hd, ATTEND_SLICE) < kEnoughGroups ? ATTEND_NARROW : 0;
    encode("attend_values", narrow, p,
           {reads(scores, rows * per_row), b.window, b.more, b.selected, b.n_selected, fixed(b.sink), reads(b.rope.cos, angles),
            reads(b.rope.sin, angles), writes(b.o, n * heads * hd), writes(b.o_raw, b.o_raw != nullptr ? n * heads * hd : 0)},
           {groups_of(hd, narrow.flags != 0 ? ATTEND_SLICE / 2 : ATTEND_SLICE), head_groups, rows}, ATTEND_THREADS,
           (ATTEND_SLICE + ATTEND_HEADS + 2) * ATTEND_PLACES * sizeof(float));
    breathe(static_cast<int>(n));
  }
}

void MetalBackend::attend(const AttendArgs& a) {
  AttendParams p = params_for(s_, a.position);
  const bool more = a.compressed != nullptr;
  const int64_t topk = more ? s_.index_topk : 0;
  p.window_capacity = static_cast<uint32_t>(a.window.capacity);
  p.more_row_bytes = static_cast<uint32_t>(s_.compressed_row_bytes());
  p.topk = static_cast<uint32_t>(topk);
  // Entries of the cache that may be selected: no more than there are positions.
  const AttendBuffers b{a.q, reads(a.window.base, a.window.capacity * a.window.row_bytes),
                        reads(a.compressed, more ? (a.position + a.n) * s_.compressed_row_bytes() : 0),
                        reads(more ? a.selected : nullptr, a.n * topk), reads(more ? a.n_selected : nullptr, more ? a.n : 0),
                        a.sink, a.rope, a.o, a.o_raw};
  attend_rows(p, b, a.n, s_.window + topk);
}

void MetalBackend::draft_attend(const DraftAttendArgs& a) {
  AttendParams p = params_for(s_, a.position);
  p.window_capacity = static_cast<uint32_t>(a.window.capacity);
  p.more_capacity = static_cast<uint32_t>(a.block.capacity);
  p.more_row_bytes = static_cast<uint32_t>(a.block.row_bytes);
  p.drafting = 1;
  p.first = static_cast<uint32_t>(a.first);
  p.n = static_cast<uint32_t>(a.n);
  const int32_t* none = nullptr;
  const AttendBuffers b{a.q, reads(a.window.base, a.window.capacity * a.window.row_bytes),
                        reads(a.block.base, a.block.capacity * a.block.row_bytes), reads(none, 0), reads(none, 0), a.sink, a.rope,
                        a.o, nullptr};
  attend_rows(p, b, a.n, s_.window + a.n);
}

}  // namespace ds4::metal
