// Steps of a decode loop that also draw: what one token of a text takes, or one block of drafts, is one call.
//
// Every token is drawn from its own row with the same options, history, seed and position, whoever computed the row: a
// block only decides how many rows are computed at once (docs/dspark.md).
#pragma once

#include <cstdint>
#include <vector>

#include "engine/session.h"
#include "sampling/sampling.h"

namespace ds4 {

// How the tokens of a text are drawn. `history` holds the text up to the token that is fed; it is left as it was.
struct Drawing {
  Sampler& sampler;
  uint64_t seed = 0;
  TokenHistory* history = nullptr;
  bool chances = false;  // Draw::chance is wanted
};

// Appends `token` and draws the one after it. When the draw fails, the session holds the token.
Draw feed(Session& session, const Drawing& how, int32_t token, Poll* poll);

// Appends tokens[0] and the n - 1 drafts behind it, and draws row after row for as long as the drafts hold: k + 1 draws
// when the first k drafts equal the draws before them. The session is left with tokens[0] and those k drafts.
//
// A draw that fails behind an accepted draft ends the block in front of that draft: a text that comes there meets the
// failure in a step of its own, as it would without drafts. `taking_back` is true while drafts are taken back; an
// exception that leaves it true may have touched the state.
std::vector<Draw> verify(Session& session, const Drawing& how, const int32_t* tokens, int n, Poll* poll, bool& taking_back);

struct Drafts {
  std::vector<int32_t> tokens;
  std::vector<float> chances;  // of the likeliest token of each row
};

// What of a draft block is to be drawn: at most n drafts behind `anchor` and `before`.
struct DraftPlan {
  int32_t anchor = 0;
  const std::vector<int32_t>& before;
  int n = 0;
  const std::vector<float>& worth;   // it ends when the product of the first i + 1 chances is not above worth[i]
  const int32_t* allowed = nullptr;  // the mask of the first of them, as in SamplingRow
  size_t n_allowed = 0;
};

// Draws drafts of the block that the drafter has at hand (Drafter::start).
Drafts draft(const Session& session, Drafter& drafter, const Drawing& how, const DraftPlan& plan);

}  // namespace ds4
