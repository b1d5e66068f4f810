#include "sampling/sampling.h"

#include <algorithm>
#include <functional>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/threads.h"
#include "sampling/passes.h"
#include "sampling/philox.h"

namespace ds4 {
namespace {

constexpr float kMinTemperature = 1e-5f;

bool in_range(float x, float low, float high) { return x >= low && x <= high; }  // false for NaN

// The Python layer says it better and earlier; this keeps every other caller out of undefined ground.
void check_options(const SamplingOptions& o, int32_t n_vocab) {
  const auto need = [](bool ok, const std::string& what) {
    if (!ok) throw OptionError(what);
  };
  need(n_vocab > 0, "vocabulary: expected at least one token, found " + std::to_string(n_vocab));
  need(o.temperature == 0.0f || in_range(o.temperature, kMinTemperature, 100.0f),
       "temperature: expected 0 or 0.00001 to 100, found " + std::to_string(o.temperature));
  need(o.top_k >= 0, "top_k: expected 0 (off) or more, found " + std::to_string(o.top_k));
  need(o.top_p >= 0.0 && o.top_p <= 1.0, "top_p: expected 0 to 1, found " + std::to_string(o.top_p));
  need(in_range(o.min_p, 0.0f, 1.0f), "min_p: expected 0 to 1, found " + std::to_string(o.min_p));
  need(in_range(o.presence_penalty, -2.0f, 2.0f), "presence_penalty: expected -2 to 2, found " + std::to_string(o.presence_penalty));
  need(in_range(o.frequency_penalty, -2.0f, 2.0f),
       "frequency_penalty: expected -2 to 2, found " + std::to_string(o.frequency_penalty));
  need(in_range(o.repetition_penalty, 0.01f, 100.0f),
       "repetition_penalty: expected 0.01 to 100, found " + std::to_string(o.repetition_penalty));
  need(o.top_logprobs >= 0 && o.top_logprobs <= n_vocab,
       "top_logprobs: expected 0 to " + std::to_string(n_vocab) + ", found " + std::to_string(o.top_logprobs));
  for (const auto& [token, value] : o.logit_bias) {
    need(token >= 0 && token < n_vocab, "logit_bias: expected token ids 0 to " + std::to_string(n_vocab - 1) + ", found " +
                                            std::to_string(token));
    need(value == -kInf || in_range(value, -100.0f, 100.0f),
         "logit_bias[" + std::to_string(token) + "]: expected -100 to 100 or -infinity, found " + std::to_string(value));
  }
}

// Smallest mass that is at least top_p of the total, without a product of more than 64 bits.
// The share is cut off to units of 2^-32, so that 0.1 (which no binary number is) means one of ten equal tokens.
uint64_t share_of(double top_p, uint64_t total) {
  const uint64_t share = static_cast<uint64_t>(top_p * 4294967296.0);  // a power of two: the product is exact
  const uint64_t high = share * (total >> 32);
  const uint64_t low = (share * (total & 0xffffffffu) + 0xffffffffu) >> 32;
  return std::max<uint64_t>(high + low, 1);
}

}  // namespace

// ---------------------------------------------------------------- history

TokenHistory::TokenHistory(int32_t n_vocab) {
  if (n_vocab <= 0) throw OptionError("vocabulary: expected at least one token, found " + std::to_string(n_vocab));
  in_prompt_.resize(static_cast<size_t>(n_vocab));
  counts_.resize(static_cast<size_t>(n_vocab));
}

void TokenHistory::check(const int32_t* tokens, size_t n) const {
  for (size_t i = 0; i < n; ++i)
    if (tokens[i] < 0 || tokens[i] >= n_vocab())
      throw TokenError("token history: expected ids 0 to " + std::to_string(n_vocab() - 1) + ", found " +
                       std::to_string(tokens[i]) + " at index " + std::to_string(i));
}

void TokenHistory::add_prompt(const int32_t* tokens, size_t n) {
  check(tokens, n);
  for (size_t i = 0; i < n; ++i) in_prompt_[static_cast<size_t>(tokens[i])] = 1;
}

void TokenHistory::add(const int32_t* tokens, size_t n) {
  check(tokens, n);
  generated_.insert(generated_.end(), tokens, tokens + n);
  for (size_t i = 0; i < n; ++i) ++counts_[static_cast<size_t>(tokens[i])];
}

void TokenHistory::drop(size_t n) {
  if (n > generated_.size())
    throw StateError("token history: cannot drop " + std::to_string(n) + " tokens, it holds " +
                     std::to_string(generated_.size()) + " generated ones");
  for (; n > 0; --n) {
    --counts_[static_cast<size_t>(generated_.back())];
    generated_.pop_back();
  }
}

// ---------------------------------------------------------------- a row

Sampler::Sampler(int32_t n_vocab, SamplingOptions options)
    : n_vocab_(n_vocab), options_(std::move(options)), wide_(!options_.plain && wide_available()) {
  check_options(options_, n_vocab_);
  const size_t n = static_cast<size_t>(n_vocab_);
  adjusted_.resize(n);
  tempered_.resize(n);
  block_max_.resize((n + kBlock - 1) / kBlock);
}

bool Sampler::needs_history() const {
  return options_.repetition_penalty != 1.0f || options_.presence_penalty != 0.0f || options_.frequency_penalty != 0.0f;
}

float Sampler::check_row(const SamplingRow& row, int64_t position) const {
  const std::string where = "position " + std::to_string(position);
  if (position < 0) throw OptionError("position: expected 0 or more, found " + std::to_string(position));
  if (needs_history() && row.history == nullptr)
    throw OptionError(where + ": presence, frequency and repetition penalties need the token history, found none");
  if (row.history != nullptr && row.history->n_vocab() != n_vocab_)
    throw OptionError(where + ": expected a token history of " + std::to_string(n_vocab_) + " tokens, found one of " +
                      std::to_string(row.history->n_vocab()));
  for (size_t i = 0; row.allowed != nullptr && i < row.n_allowed; ++i)
    if (row.allowed[i] < 0 || row.allowed[i] >= n_vocab_)
      throw OptionError(where + ": mask: expected token ids 0 to " + std::to_string(n_vocab_ - 1) + ", found " +
                        std::to_string(row.allowed[i]) + " at index " + std::to_string(i));

  const size_t n = static_cast<size_t>(n_vocab_);
  const Extremes raw = extremes(wide_, row.logits, n);
  if (raw.n_nan != 0) {
    const auto* first = std::find_if(row.logits, row.logits + n, [](float x) { return x != x; });
    throw NumericsError("logits at " + where + ": " + std::to_string(raw.n_nan) + " of " + std::to_string(n) +
                        " are NaN, the first is token " + std::to_string(first - row.logits));
  }
  if (raw.max == kInf) {
    const auto* first = std::find(row.logits, row.logits + n, kInf);
    throw NumericsError("logits at " + where + ": " + std::to_string(std::count(row.logits, row.logits + n, kInf)) + " of " +
                        std::to_string(n) + " are +infinity, the first is token " + std::to_string(first - row.logits));
  }
  if (raw.max == -kInf) throw NumericsError("logits at " + where + ": all " + std::to_string(n) + " are -infinity");
  return raw.max;
}

void Sampler::penalise(const TokenHistory& history) {
  const float repetition = options_.repetition_penalty;
  for (int32_t token = 0; token < n_vocab_; ++token) {
    if (!history.seen(token)) continue;
    float& logit = adjusted_[static_cast<size_t>(token)];
    logit = logit > 0.0f ? logit / repetition : logit * repetition;
    const uint32_t count = history.count(token);
    if (count == 0) continue;
    logit -= static_cast<float>(count) * options_.frequency_penalty + options_.presence_penalty;
  }
}

// Puts -infinity everywhere but at the allowed tokens. Uses tempered_, which is free at this time.
void Sampler::keep_allowed(const SamplingRow& row) {
  std::fill(tempered_.begin(), tempered_.end(), -kInf);
  for (size_t i = 0; i < row.n_allowed; ++i) {
    const size_t token = static_cast<size_t>(row.allowed[i]);
    tempered_[token] = adjusted_[token];
  }
  adjusted_.swap(tempered_);
}

const float* Sampler::adjust(const SamplingRow& row) {
  if (!needs_history() && options_.logit_bias.empty() && row.allowed == nullptr) return row.logits;
  std::copy(row.logits, row.logits + n_vocab_, adjusted_.begin());
  if (needs_history()) penalise(*row.history);
  for (const auto& [token, value] : options_.logit_bias) adjusted_[static_cast<size_t>(token)] += value;
  if (row.allowed != nullptr) keep_allowed(row);
  return adjusted_.data();
}

void Sampler::prepare(const SamplingRow& row, int64_t position) {
  const float raw_max = check_row(row, position);
  row_ = adjust(row);
  const size_t n = static_cast<size_t>(n_vocab_);
  max_ = row_ == row.logits ? raw_max : extremes(wide_, row_, n).max;
  if (max_ == -kInf)
    throw OptionError("position " + std::to_string(position) +
                      ": no token is left to draw, logit_bias and mask ban them all; allow at least one");
  if (max_ == kInf)
    throw NumericsError("logits at position " + std::to_string(position) + " overflow under the penalties and logit_bias");
  first_max_ = static_cast<int32_t>(std::find(row_, row_ + n, max_) - row_);
  if (options_.temperature == 0.0f) return;
  n_alive_ = temper(wide_, row_, n, max_, options_.temperature, tempered_.data(), block_max_.data());
  filter();
}

// ---------------------------------------------------------------- filters

// Every filter keeps a prefix of one order: larger logit first, equal logits by lower id. Tempered values follow that
// order (they may only add ties), so all tokens above a tempered value are such a prefix too.
void Sampler::filter() {
  listed_ = false;
  const size_t k = static_cast<size_t>(options_.top_k);
  if (k > 0 && k < n_alive_) collect_top_k(k);
  if (options_.top_p < 1.0) {
    if (listed_)
      cut_top_p(weigh());
    else
      collect_top_p();
  }
  if (options_.min_p > 0.0f) cut_min_p();
}

// candidates_ = the tokens with a tempered value of at least `lowest`.
void Sampler::collect(float lowest) {
  candidates_.clear();
  listed_ = true;
  const size_t n = static_cast<size_t>(n_vocab_);
  for (size_t begin = 0; begin < n; begin += kBlock) {
    if (block_max_[begin / kBlock] < lowest) continue;
    const size_t end = std::min(begin + kBlock, n);
    for (size_t i = begin; i < end; ++i)
      if (tempered_[i] >= lowest && tempered_[i] > -kInf)
        candidates_.push_back({(uint64_t{ds4_order_key(row_[i])} << 32) | (0xffffffffu - static_cast<uint32_t>(i)), 0});
  }
}

namespace {

constexpr auto kEarlier = [](const auto& a, const auto& b) { return a.order > b.order; };

// Tempered values to try, so that a peaked row looks at few tokens. They only save time: the result is the same.
// Nothing below the last one has any mass.
constexpr float kLevels[] = {-3.0f, -6.0f, -12.0f, -28.0f};

}  // namespace

void Sampler::collect_top_k(size_t k) {
  // The k-th largest block maximum: at least k tokens are not below it, and seldom many more.
  float lowest = -kInf;
  if (k < block_max_.size()) {
    std::vector<float> maxima = block_max_;
    const auto kth = maxima.begin() + static_cast<std::ptrdiff_t>(k - 1);
    std::nth_element(maxima.begin(), kth, maxima.end(), std::greater<>());
    lowest = *kth;
  }
  collect(lowest);
  if (candidates_.size() <= k) return;
  std::nth_element(candidates_.begin(), candidates_.begin() + static_cast<std::ptrdiff_t>(k), candidates_.end(), kEarlier);
  candidates_.resize(k);
}

uint64_t Sampler::weigh() {
  uint64_t total = 0;
  for (Candidate& c : candidates_) {
    c.mass = mass_of(ds4_exp(tempered_[static_cast<size_t>(c.token())]));
    total += c.mass;
  }
  return total;
}

// Leaves the shortest prefix whose mass reaches top_p of `total`. Halves the part in question instead of sorting it all.
void Sampler::cut_top_p(uint64_t total) {
  uint64_t missing = share_of(options_.top_p, total);
  auto begin = candidates_.begin(), end = candidates_.end();
  while (end - begin > 32) {
    const auto middle = begin + (end - begin) / 2;
    std::nth_element(begin, middle, end, kEarlier);
    uint64_t upper = 0;
    for (auto it = begin; it != middle; ++it) upper += it->mass;
    if (upper >= missing) {
      end = middle;
    } else {
      missing -= upper;
      begin = middle;
    }
  }
  std::sort(begin, end, kEarlier);
  for (; begin != end && missing > 0; ++begin) missing -= std::min(missing, begin->mass);
  candidates_.erase(begin, candidates_.end());
}

void Sampler::collect_top_p() {
  const uint64_t total = mass(wide_, row_, static_cast<size_t>(n_vocab_), max_, options_.temperature);
  const uint64_t wanted = share_of(options_.top_p, total);
  for (const float level : kLevels) {
    collect(level);
    if (weigh() >= wanted) break;
  }
  cut_top_p(total);
}

void Sampler::cut_min_p() {
  if (!listed_) collect(ds4_log(options_.min_p) - 0.01f);  // a little too many; the exact test follows
  std::erase_if(candidates_, [this](const Candidate& c) {
    return ds4_exp(tempered_[static_cast<size_t>(c.token())]) < options_.min_p;
  });
}

// ---------------------------------------------------------------- draw

namespace {

// Largest score wins, equal scores by lower id.
struct Best {
  float score = -kInf;
  int32_t token = -1;
  void offer(float tempered, uint32_t word, int32_t id) {
    if (tempered + gumbel_bound(word) < score) return;  // cannot win: the two logarithms are not needed
    const float s = tempered + gumbel_of(word);
    if (s > score || (s == score && id < token)) score = s, token = id;
  }
};

uint32_t word_of(uint64_t seed, int64_t position, int32_t token) {
  const uint32_t t = static_cast<uint32_t>(token);
  return token_words(seed, position, t / 4).word[t % 4];
}

}  // namespace

int32_t Sampler::pick_listed(uint64_t seed, int64_t position) const {
  Best best;
  best.offer(tempered_[static_cast<size_t>(first_max_)], word_of(seed, position, first_max_), first_max_);
  for (const Candidate& c : candidates_) {
    const int32_t token = c.token();
    const float tempered = tempered_[static_cast<size_t>(token)];
    if (tempered + kGumbelMax < best.score) continue;
    best.offer(tempered, word_of(seed, position, token), token);
  }
  return best.token;
}

int32_t Sampler::pick_any(uint64_t seed, int64_t position) const {
  Best best;
  best.offer(tempered_[static_cast<size_t>(first_max_)], word_of(seed, position, first_max_), first_max_);
  const size_t n = static_cast<size_t>(n_vocab_);
  for (size_t begin = 0; begin < n; begin += kBlock) {
    if (block_max_[begin / kBlock] + kGumbelMax < best.score) continue;
    const size_t count = std::min(kBlock, n - begin);
    uint32_t words[kBlock];
    if (!contest(wide_, &tempered_[begin], count, seed, position, static_cast<uint32_t>(begin), best.score, words)) continue;
    for (size_t i = 0; i < count; ++i) best.offer(tempered_[begin + i], words[i], static_cast<int32_t>(begin + i));
  }
  return best.token;
}

int32_t Sampler::pick(uint64_t seed, int64_t position) const {
  if (options_.temperature == 0.0f) return first_max_;
  return listed_ ? pick_listed(seed, position) : pick_any(seed, position);
}

void Sampler::add_logprobs(const float* logits, Draw& draw) const {
  const size_t n = static_cast<size_t>(n_vocab_);
  const float max = extremes(wide_, logits, n).max;
  const float log_sum = ds4_log(static_cast<float>(mass(wide_, logits, n, max, 1.0f)) * 0x1p-40f);
  const auto logprob = [&](int32_t token) { return (logits[token] - max) - log_sum; };
  draw.logprob = logprob(draw.token);

  const size_t wanted = static_cast<size_t>(options_.top_logprobs);
  auto& top = draw.top_logprobs;  // holds logits, best first, until the end
  for (size_t i = 0; wanted > 0 && i < n; ++i) {
    if (top.size() == wanted && !(logits[i] > top.back().second)) continue;
    if (top.size() == wanted) top.pop_back();
    const auto place = std::find_if(top.begin(), top.end(), [&](const auto& entry) { return logits[i] > entry.second; });
    top.insert(place, {static_cast<int32_t>(i), logits[i]});
  }
  for (auto& [token, value] : top) value = logprob(token);
}

// How likely the likeliest token is among what bias, penalties and mask leave, at temperature 1; to some six digits.
float Sampler::likeliest() const {
  return 1.0f / std::max(1.0f, about_sum(wide_, row_, static_cast<size_t>(n_vocab_), max_));
}

Draw Sampler::draw(const SamplingRow& row, uint64_t seed, int64_t position, bool chance) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const FlushSubnormals flush;
  prepare(row, position);
  Draw draw;
  draw.token = pick(seed, position);
  draw.n_kept = options_.temperature == 0.0f ? 1 : static_cast<int64_t>(listed_ ? candidates_.size() : n_alive_);
  if (options_.logprobs) add_logprobs(row.logits, draw);
  if (chance) draw.chance = likeliest();
  return draw;
}

Guess Sampler::guess(const SamplingRow& row, uint64_t seed, int64_t position) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const FlushSubnormals flush;
  prepare(row, position);
  return {pick(seed, position), likeliest()};
}

void Sampler::draw_many(const SamplingRow& row, const uint64_t* seeds, const int64_t* positions, size_t n,
                        int32_t* tokens) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const FlushSubnormals flush;
  if (n == 0) return;
  prepare(row, positions[0]);
  for (size_t i = 0; i < n; ++i) tokens[i] = pick(seeds[i], positions[i]);
}

float gumbel(uint64_t seed, int64_t position, int32_t token) {
  const FlushSubnormals flush;
  return gumbel_of(word_of(seed, position, token));
}

uint64_t child_seed(uint64_t seed, uint64_t index) {
  const PhiloxBlock block = noise_block(seed, static_cast<int64_t>(index), 0, NoisePurpose::child_seed);
  return (uint64_t{block.word[1]} << 32) | block.word[0];
}

}  // namespace ds4
