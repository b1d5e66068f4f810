// moe: router in two dispatches (scores; choice), experts in two (gate, up and SwiGLU; down, sum and expand), the shared
// expert beside the routed ones.
#include "moe.h"

#include "metal_host/products.h"

namespace ds4::metal {

void MetalBackend::route(const RouteArgs& a) {
  const Matrix& m = a.w->gate;
  const int64_t e = s_.n_experts, k = s_.top_k;
  LinearParams scored = linear_params(m, 0, m.rows, a.n, s_.hidden, e);
  const LinearRun run = linear_run(m, scored, LINEAR_SCORE, a.x);
  encode(run.kernel, run.constants, scored,
         {fixed(m.data), fixed(scales(m)), reads(a.x, a.n * int64_t{s_.hidden}), writes(a.scores, a.n * e), absent(), absent(), absent(), absent(),
          absent()},
         run.grid, run.threads, run.threadgroup_bytes);
  const RouteParams params{static_cast<uint32_t>(e), static_cast<uint32_t>(k), s_.route_scale, 0};
  encode("route_pick", {}, params, {reads(a.scores, a.n * e), fixed(a.w->bias), writes(a.experts, a.n * k), writes(a.weights, a.n * k)}, Grid{a.n},
         kLanes, MOE_MAX_TOP_K * sizeof(int32_t));
}

namespace {

MoeMatrix described(const Matrix& m) {
  return {static_cast<uint64_t>(m.row_bytes), static_cast<uint32_t>(m.scale_row_bytes), static_cast<uint32_t>(m.cols)};
}
MoeMatrix described(const ExpertMatrices& m) {
  return {static_cast<uint64_t>(m.row_bytes), static_cast<uint32_t>(m.scale_row_bytes), static_cast<uint32_t>(m.cols)};
}

// Of several tokens an expert may have one or two, and then these are staged.
int64_t staged_at_most(int64_t rows) { return std::min<int64_t>(rows, WIDE_STAGED_ROWS); }

constexpr size_t kPlanBytes = (1 + 2 * MOE_MAX_PAIRS) * sizeof(int32_t);

}  // namespace

// Gate, up and SwiGLU of the shared expert and of the routed ones, which are found by the kernel or, with groups, given.
void MetalBackend::moe_up(const MoeArgs& a, const ExpertTable& table, const MoeGroups& groups) {
  const int64_t k = s_.top_k, f = s_.expert_dim, d = s_.hidden, slots = k + 1;
  const ExpertWeights& shared = a.w->shared;
  MoeUpParams up{described(shared.w1),
                 described(shared.w3),
                 static_cast<uint32_t>(a.n),
                 static_cast<uint32_t>(k),
                 static_cast<uint32_t>(f),
                 static_cast<uint32_t>(d),
                 s_.swiglu_limit,
                 static_cast<uint32_t>(groups.pairs_at),
                 0,
                 0};
  constexpr size_t kUpBytes = 2 * MOE_TILE * MOE_UP_OUTPUTS * sizeof(float) + kPlanBytes;
  const int64_t outputs = MOE_UP_OUTPUTS_OF(quant_), blocks = (f + outputs - 1) / outputs;
  Constants constants;
  constants.rows = tile_rows(a.n);
  // The two write different slots of mid. For the hazard tracking they share it out as one float and the rest: no barrier
  // comes between them, and both count as written for what reads mid, whatever barrier comes before either.
  const auto issue = [&](bool tiles, bool wide, std::initializer_list<Argument> buffers, int64_t rows_or_groups, bool by_z) {
    const int64_t simdgroups = 2 * groups_of(up.gate.cols, kSegmentColumns), made = std::min<int64_t>(constants.rows, WIDE_TOKENS), of_tile = WIDE_ROWS_OF(constants.rows);
    const int64_t stage = wide_stage(static_cast<RowType>(constants.type), constants.rows, staged_at_most(constants.rows));
    up.area = static_cast<uint32_t>(std::max<int64_t>(stage, 64 * of_tile * made * 4));
    const size_t wide_bytes = static_cast<size_t>(simdgroups) * up.area + kPlanBytes + 32 * WIDE_TOKENS * sizeof(float);
    if (wide && device_has(wide_bytes)) {
      encode("moe_up_wide", constants, up, buffers, Grid{groups_of(f, of_tile), by_z ? 1 : rows_or_groups}, static_cast<int>(simdgroups) * kLanes,
             wide_bytes);
    } else if (tiles) {
      constants.flags |= tile_flags(static_cast<int64_t>(up.gate.cols));
      encode("moe_up_many", constants, up, buffers, Grid{groups_of(f, TILE_OUTPUTS), rows_or_groups}, TILE_THREADS, TILE_BYTES);
    } else {
      encode("moe_up", constants, up, buffers, by_z ? Grid{blocks, 1, rows_or_groups} : Grid{blocks, rows_or_groups}, MOE_UP_SIMDGROUPS * kLanes,
             kUpBytes);
    }
  };
  constants.type = static_cast<int32_t>(shared.w1.type);
  constants.flags = MOE_SHARED;
  const bool tiles = use_tiles(a.n, groups_of(f, TILE_OUTPUTS) * groups_of(a.n, TILE_TOKENS));
  const bool few = !quant_ && a.n <= MOE_TILE && groups.ints == nullptr;
  const bool alike = shared.w1.row_bytes == shared.w3.row_bytes && aligned_for(shared.w1, a.xq, d) && aligned_for(shared.w3, a.xq, d);
  issue(tiles, few && use_wide(shared.w1.type, shared.w1.cols, shared.w1.row_bytes, alike),
        {fixed(shared.w1.data), fixed(scales(shared.w1)), absent(), fixed(shared.w3.data), fixed(scales(shared.w3)), absent(),
         reads(a.xq, a.n * d), absent(), absent(), writes(a.mid, 1), absent()},
        groups_of(a.n, tiles ? TILE_TOKENS : MOE_TILE), true);
  up.gate = described(table.w1);
  up.up = described(table.w3);
  constants.type = static_cast<int32_t>(table.w1.type);
  constants.flags = groups.ints != nullptr ? MOE_MANY : 0;
  issue(groups.tile == TILE_TOKENS,
        few && use_wide(table.w1.type, table.w1.cols, table.w1.row_bytes,
                        table.w1.aligned && table.w3.aligned && table.w1.row_bytes == table.w3.row_bytes),
        {fixed(table.w1.data), fixed(table.w1.scale), fixed(table.w1.offsets), fixed(table.w3.data), fixed(table.w3.scale),
         fixed(table.w3.offsets), reads(a.xq, a.n * d), reads(a.experts, a.n * k), reads(a.weights, a.n * k),
         writes_from(a.mid, 1, a.n * slots * f - 1), groups.ints != nullptr ? reads(groups.ints, groups.n_ints) : absent()},
        groups.most, false);
}

// Many tokens: grouped by expert, 32 pairs to a tile where an expert has more than a stream of moe_up takes. The products of all
// slots are kept for some elements of the hidden size at a time. The sums are a dispatch of their own, so nothing is held back
// for the expand.
void MetalBackend::moe_many(const MoeArgs& a, const ExpertTable& table) {
  const int64_t k = s_.top_k, f = s_.expert_dim, d = s_.hidden, slots = k + 1, pairs = a.n * k;
  const bool tiles = use_tiles(a.n, pairs >= MOE_TILE * int64_t{s_.n_experts} ? groups_of(f, TILE_OUTPUTS) * groups_of(pairs, TILE_TOKENS) : 0);
  MoeGroups groups;
  groups.tile = tiles ? TILE_TOKENS : MOE_TILE;
  groups.most = pairs / groups.tile + std::min<int64_t>(pairs, s_.n_experts);  // full ones, and a rest for each expert
  groups.pairs_at = MOE_GROUPS + MOE_GROUP_INTS * groups.most;
  groups.n_ints = groups.pairs_at + pairs;
  int32_t* ints = temp<int32_t>(Temp::moe_groups, groups.n_ints);
  groups.ints = ints;
  const MoeGroupParams group{static_cast<uint32_t>(pairs), static_cast<uint32_t>(s_.n_experts), static_cast<uint32_t>(groups.pairs_at),
                             static_cast<uint32_t>(groups.tile)};
  encode("moe_group", {}, group, {reads(a.experts, pairs), writes(ints, groups.n_ints)}, Grid{}, MOE_GROUP_THREADS,
         2 * (static_cast<size_t>(s_.n_experts) + 1) * sizeof(int32_t));
  moe_up(a, table, groups);
  const int64_t most = std::max<int64_t>(kPartFloats / (a.n * slots) / TILE_OUTPUTS * TILE_OUTPUTS, TILE_OUTPUTS);
  for (int64_t row0 = 0; row0 < d; row0 += most) moe_down_many(a, table, groups, row0, std::min(most, d - row0));
}

// Elements row0 .. row0 + rows - 1 of y.
void MetalBackend::moe_down_many(const MoeArgs& a, const ExpertTable& table, const MoeGroups& groups, int64_t row0, int64_t rows) {
  const int64_t k = s_.top_k, f = s_.expert_dim, d = s_.hidden, slots = k + 1;
  float* parts = temp<float>(Temp::moe_parts, a.n * slots * rows);
  const MoePartParams part{described(table.w2), static_cast<uint32_t>(k), static_cast<uint32_t>(f), static_cast<uint32_t>(groups.pairs_at),
                           static_cast<uint32_t>(row0), static_cast<uint32_t>(rows)};
  Constants constants;
  constants.type = static_cast<int32_t>(table.w2.type);
  const std::initializer_list<Argument> buffers{fixed(table.w2.data), fixed(table.w2.scale), fixed(table.w2.offsets), reads(a.mid, a.n * slots * f),
                                                reads(groups.ints, groups.n_ints), writes(parts, 1)};
  if (groups.tile == TILE_TOKENS) {
    constants.flags = tile_flags(table.w2.cols);
    encode("moe_part_many", constants, part, buffers, Grid{groups_of(rows, TILE_OUTPUTS), groups.most}, TILE_THREADS, TILE_BYTES);
  } else {
    encode("moe_part", constants, part, buffers, Grid{groups_of(rows, MOE_DOWN_OUTPUTS * MOE_DOWN_SIMDGROUPS), groups.most},
           MOE_DOWN_SIMDGROUPS * kLanes);
  }
  const Matrix& down = a.w->shared.w2;
  LinearParams shared = linear_params(down, static_cast<int>(row0), static_cast<int>(rows), a.n, slots * f, slots * rows);
  shared.x_at = static_cast<uint32_t>(k * f);
  shared.out_at = static_cast<uint32_t>(k * rows);
  const LinearRun run = linear_run(down, shared, round_ ? LINEAR_ROUND : 0, a.mid);
  encode(run.kernel, run.constants, shared,
         {fixed(down.data), fixed(scales(down)), reads(a.mid, a.n * slots * f), writes_from(parts, 1, a.n * slots * rows - 1), absent(),
          absent(), absent(), absent(), absent()},
         run.grid, run.threads, run.threadgroup_bytes);
  const MoeSumParams sum{static_cast<uint32_t>(slots), static_cast<uint32_t>(d), static_cast<uint32_t>(row0), static_cast<uint32_t>(rows)};
  encode("moe_sum", {}, sum, {reads(parts, a.n * slots * rows), writes(a.y, a.n * d)}, Grid{groups_of(rows, MOE_SUM_THREADS), a.n},
         MOE_SUM_THREADS);
}

void MetalBackend::moe(const MoeArgs& a) {
  const std::shared_ptr<const ExpertTable> table = expert_table(*a.w);
  held_.push_back(table);
  const int64_t k = s_.top_k, f = s_.expert_dim, d = s_.hidden, slots = k + 1;
  if (a.n > MOE_TILE) {
    for (int i = 0; i < a.n; i += kMoeRows) {
      breathe(a.n);
      MoeArgs part = a;
      part.n = std::min(kMoeRows, a.n - i);
      part.xq += i * d;
      part.experts += i * k;
      part.weights += i * k;
      part.mid += i * slots * f;
      part.y += i * d;
      moe_many(part, *table);
    }
    return;
  }
  MoeGroups none;
  none.most = std::min<int64_t>(a.n * k, s_.n_experts);
  moe_up(a, *table, none);
  finish_later(a.y, a.n, [this, a, table, k, f, d, slots](const HcWriteArgs* write) {
    const ExpertWeights& shared = a.w->shared;
    const int64_t c = s_.n_streams;
    MoeDownParams down{described(table->w2), described(shared.w2), static_cast<uint32_t>(a.n), static_cast<uint32_t>(k),
                       static_cast<uint32_t>(f), static_cast<uint32_t>(d), static_cast<uint32_t>(c), 0};
    Constants constants;
    constants.rows = tile_rows(a.n);
    constants.type = static_cast<int32_t>(table->w2.type);
    constants.type2 = static_cast<int32_t>(shared.w2.type);
    constants.flags = write != nullptr ? MOE_EXPAND : 0;
    static_assert(MOE_DOWN_OUTPUTS * MOE_TILE == kLanes);
    constexpr size_t kDownBytes = kPlanBytes + (MOE_MAX_PAIRS + MOE_TILE) * MOE_DOWN_OUTPUTS * sizeof(float);
    const int64_t of_tile = WIDE_DOWN_ROWS, made = std::min<int64_t>(constants.rows, WIDE_TOKENS), staged = staged_at_most(constants.rows);
    down.stage = static_cast<uint32_t>(std::max(wide_stage(table->w2.type, of_tile, staged), wide_stage(shared.w2.type, of_tile, staged)));
    const size_t sums = static_cast<size_t>(64 * of_tile * made) * sizeof(float);
    const size_t wide_bytes = WIDE_TASKS * (down.stage + sums) + (MOE_MAX_PAIRS + MOE_TILE) * static_cast<size_t>(of_tile) * sizeof(float) + kPlanBytes;
    const bool wide = use_wide(table->w2.type, table->w2.cols, table->w2.row_bytes, table->w2.aligned) &&
                      use_wide(shared.w2.type, shared.w2.cols, shared.w2.row_bytes, aligned_for(shared.w2, a.mid, f)) && device_has(wide_bytes);
    encode(wide ? "moe_down_wide" : "moe_down", constants, down,
           {fixed(table->w2.data), fixed(table->w2.scale), fixed(table->w2.offsets), fixed(shared.w2.data), fixed(scales(shared.w2)),
            reads(a.mid, a.n * slots * f), reads(a.experts, a.n * k), writes(a.y, a.n * d),
            write != nullptr ? updates(write->stream, a.n * c * d) : absent(), write != nullptr ? reads(write->post, a.n * c) : absent(),
            write != nullptr ? reads(write->comb, a.n * c * c) : absent()},
           Grid{groups_of(d, wide ? of_tile : MOE_DOWN_OUTPUTS)}, (wide ? WIDE_TASKS : MOE_DOWN_SIMDGROUPS) * kLanes,
           wide ? wide_bytes : kDownBytes);
  });
}

}  // namespace ds4::metal
