// moe: the router's choice; gate, up and SwiGLU; down, sum of experts and expand.
#pragma once

#include "compat.h"

#define MOE_MAX_TOP_K 8
#define MOE_TILE 8          // tokens that share a stream of weights
#define MOE_MAX_PAIRS 64    // MOE_TILE * MOE_MAX_TOP_K
#define MOE_UP_OUTPUTS 32   // middle elements of a threadgroup, at most: a quantiser group
#define MOE_UP_OUTPUTS_OF(quant) ((quant) != 0 ? 32u : 8u)  // without a quantiser: one a simdgroup
#define MOE_UP_SIMDGROUPS 8
#define MOE_DOWN_OUTPUTS 4  // of a threadgroup; times MOE_TILE they are the lanes of a simdgroup
#define MOE_DOWN_SIMDGROUPS 8

// Bits of fc_flags.
#define MOE_SHARED 1  // moe_up: the shared expert, all tokens
#define MOE_EXPAND 2  // moe_down: the result goes into the streams as well
#define MOE_MANY 4    // moe_up: many tokens, grouped by expert beforehand (moe_group)

// Many tokens: [0] the number of groups, from MOE_GROUPS on their descriptions, then the pairs (token * top_k + slot) by expert.
#define MOE_GROUPS 4        // ints in front
#define MOE_GROUP_INTS 4    // of a group: expert, its first pair in the list, pairs, 0
#define MOE_GROUP_THREADS 512
#define MOE_SUM_THREADS 256

struct RouteParams {
  uint32_t n_experts, top_k;
  float scale;
  uint32_t zero;
};

struct MoeMatrix {
  uint64_t row_bytes;
  uint32_t scale_row_bytes, cols;
};

struct MoeUpParams {
  struct MoeMatrix gate, up;
  uint32_t n, top_k, expert_dim, hidden;
  float limit;
  uint32_t pairs_at;  // where the list of pairs begins (MOE_MANY)
  uint32_t area, zero;  // moe_up_wide: bytes of threadgroup memory of a simdgroup
};

struct MoeGroupParams {
  uint32_t pairs, n_experts, pairs_at;
  uint32_t tile;  // pairs of a group, at most
};

struct MoePartParams {
  struct MoeMatrix routed;
  uint32_t top_k, expert_dim, pairs_at;
  uint32_t row0, rows;  // elements of the hidden size that are made
};

struct MoeSumParams {
  uint32_t slots, hidden;
  uint32_t row0, rows;  // elements of the hidden size that the parts hold
};

struct MoeDownParams {
  struct MoeMatrix routed, shared;
  uint32_t n, top_k, expert_dim, hidden, streams;
  uint32_t stage;  // moe_down_wide: bytes of threadgroup memory in which a simdgroup stages weights
};
