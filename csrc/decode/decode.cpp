#include "decode/decode.h"

#include <algorithm>
#include <exception>

#include "base/error.h"

namespace ds4 {

namespace {

// Takes back what was added to a history, also when something fails.
class Tried {
 public:
  explicit Tried(TokenHistory* history) : history_(history) {}
  ~Tried() {
    if (history_ != nullptr) history_->drop(n_);
  }
  Tried(const Tried&) = delete;
  Tried& operator=(const Tried&) = delete;
  void add(int32_t token) {
    if (history_ == nullptr) return;
    history_->add(&token, 1);
    ++n_;
  }

 private:
  TokenHistory* history_;
  size_t n_ = 0;
};

void check_vocabulary(const Session& session, const Sampler& sampler) {
  if (session.model().shape.vocab != sampler.n_vocab()) throw OptionError("[decode] the sampler has another vocabulary");
}

Draw draw_row(Session& session, const Drawing& how, const float* row, int64_t position) {
  session.faults().at(FaultPoint::draw);
  return how.sampler.draw({row, how.history, nullptr, 0}, how.seed, position, how.chances);
}

}  // namespace

Draw feed(Session& session, const Drawing& how, int32_t token, Poll* poll) {
  check_vocabulary(session, how.sampler);
  session.run(&token, 1, Logits::last, nullptr, poll);
  return draw_row(session, how, session.logits(), session.state().position());
}

std::vector<Draw> verify(Session& session, const Drawing& how, const int32_t* tokens, int n, Poll* poll,
                         bool& taking_back) {
  taking_back = false;
  check_vocabulary(session, how.sampler);
  const int64_t start = session.state().position();
  session.run(tokens, n, Logits::all, nullptr, poll);
  std::vector<Draw> draws;
  std::exception_ptr failed;
  try {
    Tried tried(how.history);
    for (int i = 0; i < n; ++i) {
      draws.push_back(draw_row(session, how, session.logits() + int64_t{i} * session.model().shape.vocab, start + 1 + i));
      if (i + 1 == n || draws.back().token != tokens[i + 1]) break;
      tried.add(tokens[i + 1]);
    }
  } catch (...) {
    if (draws.empty()) failed = std::current_exception();
  }
  const int64_t end = start + static_cast<int64_t>(std::max<size_t>(draws.size(), 1));
  if (end < session.state().position()) {
    taking_back = true;
    session.truncate(end, poll);
    taking_back = false;
  }
  if (failed) std::rethrow_exception(failed);
  return draws;
}

Drafts draft(const Session& session, Drafter& drafter, const Drawing& how, const DraftPlan& plan) {
  check_vocabulary(session, how.sampler);
  Tried tried(how.history);
  int32_t previous = plan.anchor;
  for (const int32_t token : plan.before) tried.add(previous = token);
  Drafts out;
  float survival = 1.0f;
  const int first = static_cast<int>(plan.before.size());
  for (int i = first; i < std::min(first + plan.n, drafter.n_rows()); ++i) {
    const SamplingRow row{drafter.row(i, previous), how.history, plan.allowed, plan.n_allowed};
    const Guess guess = how.sampler.guess(row, how.seed, session.state().position() + 1 + i);
    out.tokens.push_back(previous = guess.token);
    out.chances.push_back(guess.chance);
    survival *= guess.chance;
    const auto made = static_cast<size_t>(i - first);
    if (made < plan.worth.size() && !(survival > plan.worth[made])) break;
    tried.add(previous);
  }
  return out;
}

}  // namespace ds4
