// moe: router in two dispatches (scores; choice), experts in two (gate, up and SwiGLU; down, sum and expand), the shared
// expert beside the routed ones.
#include "moe.h"

#include "metal_host/products.h"

namespace ds4::metal {

void MetalBackend::route(const RouteArgs& a) {
  const Matrix& m = a.w->gate;
  const int64_t e = s_.n_experts, k = s_.top_k;
  encode("linear", linear_constants(m, a.n, LINEAR_SCORE), linear_params(m, 0, m.rows, a.n, s_.hidden, e),
         {fixed(m.data), fixed(scales(m)), reads(a.x, a.n * int64_t{s_.hidden}), writes(a.scores, a.n * e), absent(), absent(), absent(), absent(),
          absent()},
         linear_grid(m.rows, a.n), LINEAR_SIMDGROUPS * kLanes);
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

constexpr int kMoeRows = 1024;  // tokens that are grouped together: the parts of their slots are kept
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
                 static_cast<uint32_t>(groups.pairs_at)};
  constexpr size_t kUpBytes = 2 * MOE_TILE * MOE_UP_OUTPUTS * sizeof(float) + kPlanBytes;
  const int64_t outputs = MOE_UP_OUTPUTS_OF(quant_), blocks = (f + outputs - 1) / outputs;
  Constants constants;
  constants.rows = tile_rows(a.n);
  // The two write different slots of mid. For the hazard tracking they share it out as one float and the rest: no barrier
  // comes between them, and both count as written for what reads mid, whatever barrier comes before either.
  constants.type = static_cast<int32_t>(shared.w1.type);
  constants.flags = MOE_SHARED;
  encode("moe_up", constants, up,
         {fixed(shared.w1.data), fixed(scales(shared.w1)), absent(), fixed(shared.w3.data), fixed(scales(shared.w3)), absent(),
          reads(a.xq, a.n * d), absent(), absent(), writes(a.mid, 1), absent()},
         Grid{blocks, 1, (a.n + MOE_TILE - 1) / MOE_TILE}, MOE_UP_SIMDGROUPS * kLanes, kUpBytes);
  up.gate = described(table.w1);
  up.up = described(table.w3);
  constants.type = static_cast<int32_t>(table.w1.type);
  constants.flags = groups.ints != nullptr ? MOE_MANY : 0;
  encode("moe_up", constants, up,
         {fixed(table.w1.data), fixed(table.w1.scale), fixed(table.w1.offsets), fixed(table.w3.data), fixed(table.w3.scale),
          fixed(table.w3.offsets), reads(a.xq, a.n * d), reads(a.experts, a.n * k), reads(a.weights, a.n * k),
          writes_from(a.mid, 1, a.n * slots * f - 1), groups.ints != nullptr ? reads(groups.ints, groups.n_ints) : absent()},
         Grid{blocks, groups.most}, MOE_UP_SIMDGROUPS * kLanes, kUpBytes);
}

// Many tokens: grouped by expert. The sums are a dispatch of their own, so nothing is held back for the expand.
void MetalBackend::moe_many(const MoeArgs& a, const ExpertTable& table) {
  const int64_t k = s_.top_k, f = s_.expert_dim, d = s_.hidden, slots = k + 1, pairs = a.n * k;
  MoeGroups groups;
  groups.most = pairs / MOE_TILE + std::min<int64_t>(pairs, s_.n_experts);  // full ones, and a rest for each expert
  groups.pairs_at = MOE_GROUPS + MOE_GROUP_INTS * groups.most;
  groups.n_ints = groups.pairs_at + pairs;
  int32_t* ints = temp<int32_t>(Temp::moe_groups, groups.n_ints);
  groups.ints = ints;
  const MoeGroupParams group{static_cast<uint32_t>(pairs), static_cast<uint32_t>(s_.n_experts), static_cast<uint32_t>(groups.pairs_at), 0};
  encode("moe_group", {}, group, {reads(a.experts, pairs), writes(ints, groups.n_ints)}, Grid{}, MOE_GROUP_THREADS,
         2 * (static_cast<size_t>(s_.n_experts) + 1) * sizeof(int32_t));
  moe_up(a, table, groups);
  float* parts = temp<float>(Temp::moe_parts, a.n * slots * d);
  const MoePartParams part{described(table.w2), static_cast<uint32_t>(k), static_cast<uint32_t>(f), static_cast<uint32_t>(d),
                           static_cast<uint32_t>(groups.pairs_at)};
  Constants constants;
  constants.type = static_cast<int32_t>(table.w2.type);
  constexpr int kPer = MOE_DOWN_OUTPUTS * MOE_DOWN_SIMDGROUPS;
  encode("moe_part", constants, part,
         {fixed(table.w2.data), fixed(table.w2.scale), fixed(table.w2.offsets), reads(a.mid, a.n * slots * f), reads(ints, groups.n_ints),
          writes(parts, 1)},
         Grid{(d + kPer - 1) / kPer, groups.most}, MOE_DOWN_SIMDGROUPS * kLanes);
  const Matrix& down = a.w->shared.w2;
  LinearParams shared = linear_params(down, 0, down.rows, a.n, slots * f, slots * d);
  shared.x_at = static_cast<uint32_t>(k * f);
  shared.out_at = static_cast<uint32_t>(k * d);
  encode("linear", linear_constants(down, a.n, round_ ? LINEAR_ROUND : 0), shared,
         {fixed(down.data), fixed(scales(down)), reads(a.mid, a.n * slots * f), writes_from(parts, 1, a.n * slots * d - 1), absent(), absent(),
          absent(), absent(), absent()},
         linear_grid(down.rows, a.n), LINEAR_SIMDGROUPS * kLanes);
  const MoeSumParams sum{static_cast<uint32_t>(slots), static_cast<uint32_t>(d)};
  encode("moe_sum", {}, sum, {reads(parts, a.n * slots * d), writes(a.y, a.n * d)}, Grid{(d + MOE_SUM_THREADS - 1) / MOE_SUM_THREADS, a.n},
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
    const MoeDownParams down{described(table->w2), described(shared.w2), static_cast<uint32_t>(a.n), static_cast<uint32_t>(k),
                             static_cast<uint32_t>(f), static_cast<uint32_t>(d), static_cast<uint32_t>(c), 0};
    Constants constants;
    constants.rows = tile_rows(a.n);
    constants.type = static_cast<int32_t>(table->w2.type);
    constants.type2 = static_cast<int32_t>(shared.w2.type);
    constants.flags = write != nullptr ? MOE_EXPAND : 0;
    static_assert(MOE_DOWN_OUTPUTS * MOE_TILE == kLanes);
    constexpr size_t kDownBytes = kPlanBytes + (MOE_MAX_PAIRS + MOE_TILE) * MOE_DOWN_OUTPUTS * sizeof(float);
    encode("moe_down", constants, down,
           {fixed(table->w2.data), fixed(table->w2.scale), fixed(table->w2.offsets), fixed(shared.w2.data), fixed(scales(shared.w2)),
            reads(a.mid, a.n * slots * f), reads(a.experts, a.n * k), writes(a.y, a.n * d),
            write != nullptr ? updates(write->stream, a.n * c * d) : absent(), write != nullptr ? reads(write->post, a.n * c) : absent(),
            write != nullptr ? reads(write->comb, a.n * c * c) : absent()},
           Grid{(d + MOE_DOWN_OUTPUTS - 1) / MOE_DOWN_OUTPUTS}, MOE_DOWN_SIMDGROUPS * kLanes, kDownBytes);
  });
}

}  // namespace ds4::metal
