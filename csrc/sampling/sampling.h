// Drawing a token from a row of logits: penalties, bias, mask, temperature, filters, keyed noise.
//
// A draw is a function of the options, the logits, the token history, the seed and the position, and of nothing else:
// not of earlier draws, threads, instruction set or batch. docs/sampling.md defines every step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace ds4 {

struct SamplingOptions {
  float temperature = 1.0f;  // 0: the first maximum, no noise
  int64_t top_k = 0;         // 0: off
  double top_p = 1.0;        // 1: off
  float min_p = 0.0f;        // 0: off
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  float repetition_penalty = 1.0f;
  std::vector<std::pair<int32_t, float>> logit_bias;  // token id, value to add; -infinity bans
  bool logprobs = false;
  int top_logprobs = 0;
  bool plain = false;  // use the baseline instruction set only (same bits; for tests)
};

// Which tokens the penalties see. Prompt tokens count for the repetition penalty only, generated tokens for all three.
// Tokens are added one by one and dropped from the end, so that rows of a verify step can be tried and taken back.
class TokenHistory {
 public:
  explicit TokenHistory(int32_t n_vocab);
  void add_prompt(const int32_t* tokens, size_t n);
  void add(const int32_t* tokens, size_t n);
  void drop(size_t n);  // the last n generated tokens

  int32_t n_vocab() const { return static_cast<int32_t>(in_prompt_.size()); }
  size_t n_generated() const { return generated_.size(); }
  bool seen(int32_t token) const { return in_prompt_[static_cast<size_t>(token)] != 0 || count(token) != 0; }
  uint32_t count(int32_t token) const { return counts_[static_cast<size_t>(token)]; }

 private:
  void check(const int32_t* tokens, size_t n) const;

  std::vector<uint8_t> in_prompt_;  // [n_vocab]
  std::vector<uint32_t> counts_;    // [n_vocab] among the generated tokens
  std::vector<int32_t> generated_;
};

struct Draw {
  int32_t token = -1;
  int64_t n_kept = 0;    // tokens that the filters left; 1 at temperature 0
  float logprob = 0.0f;  // of the model's own distribution (raw logits, temperature 1), if asked for
  std::vector<std::pair<int32_t, float>> top_logprobs;  // best first, equal ones by id
  float chance = 0.0f;  // of the likeliest token, as in Guess, if asked for
};

// The inputs of one draw besides seed and position.
struct SamplingRow {
  const float* logits = nullptr;          // [n_vocab]
  const TokenHistory* history = nullptr;  // needed if a penalty is set
  const int32_t* allowed = nullptr;       // token ids of the mask, any order; nullptr: every token
  size_t n_allowed = 0;
};

// A drafter's draw, and how likely its likeliest token is among what bias, penalties and mask leave, at temperature 1.
struct Guess {
  int32_t token = -1;
  float chance = 0.0f;
};

// Calls from several threads take turns: the working memory (8 bytes a token) belongs to the sampler.
class Sampler {
 public:
  Sampler(int32_t n_vocab, SamplingOptions options);  // OptionError

  // NumericsError: NaN or +infinity in the logits, or all are -infinity. OptionError: no token left, no history.
  Draw draw(const SamplingRow& row, uint64_t seed, int64_t position, bool chance = false);

  // The same token as draw().
  Guess guess(const SamplingRow& row, uint64_t seed, int64_t position);

  // The tokens of n draws from one row; seeds and positions are [n].
  void draw_many(const SamplingRow& row, const uint64_t* seeds, const int64_t* positions, size_t n, int32_t* tokens);

  const SamplingOptions& options() const { return options_; }
  int32_t n_vocab() const { return n_vocab_; }
  bool needs_history() const;

 private:
  struct Candidate {
    uint64_t order;  // larger is earlier: key of the logit, then lower id
    uint64_t mass;
    int32_t token() const { return static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(order)); }
  };

  float check_row(const SamplingRow& row, int64_t position) const;  // returns the largest logit
  void prepare(const SamplingRow& row, int64_t position);
  const float* adjust(const SamplingRow& row);
  void penalise(const TokenHistory& history);
  void keep_allowed(const SamplingRow& row);
  void filter();
  void collect(float lowest);
  void collect_top_k(size_t k);
  uint64_t weigh();
  void cut_top_p(uint64_t total);
  void collect_top_p();
  void cut_min_p();
  int32_t pick(uint64_t seed, int64_t position) const;
  int32_t pick_listed(uint64_t seed, int64_t position) const;
  int32_t pick_any(uint64_t seed, int64_t position) const;
  void add_logprobs(const float* logits, Draw& draw) const;
  float likeliest() const;

  const int32_t n_vocab_;
  const SamplingOptions options_;
  const bool wide_;  // AVX2 versions of the passes
  std::mutex mutex_;

  // Of the row at hand.
  std::vector<float> adjusted_;   // [n_vocab] logits after penalties, bias and mask
  std::vector<float> tempered_;   // [n_vocab] (adjusted - maximum) / temperature
  std::vector<float> block_max_;  // largest tempered value of every 64 tokens
  const float* row_ = nullptr;    // adjusted_, or the logits themselves
  float max_ = 0.0f;
  int32_t first_max_ = 0;
  size_t n_alive_ = 0;  // tokens with a tempered value above -infinity
  bool listed_ = false;  // the filters left exactly candidates_; otherwise every token that is alive
  std::vector<Candidate> candidates_;
};

// Noise of one token at one position.
float gumbel(uint64_t seed, int64_t position, int32_t token);

// The seed of the index-th stream that is derived from `seed` (a fork's, for instance).
uint64_t child_seed(uint64_t seed, uint64_t index);

}  // namespace ds4
