// The part of a session that drafts. A whole block is one call without the GIL: the stages, and for each draft in turn its
// row and its draw.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "bindings/session_handle.h"
#include "sampling/sampling.h"

namespace ds4::py {

namespace {

using Drafts = std::pair<std::vector<int32_t>, std::vector<float>>;

// Takes back what was added to a history, also when something fails.
class Tried {
 public:
  explicit Tried(TokenHistory* history) : history_(history) {}
  ~Tried() {
    if (history_ != nullptr) history_->drop(n_);
  }
  void add(int32_t token) {
    if (history_ == nullptr) return;
    history_->add(&token, 1);
    ++n_;
  }
  Tried(const Tried&) = delete;
  Tried& operator=(const Tried&) = delete;

 private:
  TokenHistory* history_;
  size_t n_ = 0;
};

void start(SessionHandle& h, int32_t anchor, int n_rows) {
  h.call([&](Session&, Poll* poll) {
    h.drafter().start(anchor, n_rows, poll);
    return 0;
  });
}

// Draws the drafts behind `before` (which follow the anchor), until all rows of the block are drawn, or the product of
// the chances is not above `worth` of that many drafts.
Drafts draw(SessionHandle& h, Sampler& sampler, uint64_t seed, int32_t anchor, const std::vector<int32_t>& before, int n,
            const std::vector<float>& worth, TokenHistory* history, const std::optional<Tokens>& allowed) {
  return h.call([&](Session& s, Poll*) {
    Drafter& drafter = h.drafter();
    SamplingRow row{h.row_buffer(), history, nullptr, 0};
    if (s.model().shape.vocab != sampler.n_vocab()) throw OptionError("[draft] the sampler has another vocabulary");
    if (allowed) {
      static const int32_t nothing = 0;
      row.n_allowed = allowed->shape(0);
      row.allowed = row.n_allowed == 0 ? &nothing : allowed->data();
    }
    Tried tried(history);
    int32_t previous = anchor;
    for (const int32_t token : before) tried.add(previous = token);
    Drafts out;
    float survival = 1.0f;
    const int first = static_cast<int>(before.size());
    for (int i = first; i < std::min(first + n, drafter.n_rows()); ++i) {
      drafter.row(i, previous, h.row_buffer());
      const Guess guess = sampler.guess(row, seed, s.state().position() + 1 + i);
      out.first.push_back(previous = guess.token);
      out.second.push_back(guess.chance);
      survival *= guess.chance;
      const auto made = static_cast<size_t>(i - first);
      if (made < worth.size() && !(survival > worth[made])) break;
      tried.add(previous);
    }
    return out;
  });
}

nb::tuple row(SessionHandle& h, int i, int32_t previous) {
  const SessionHandle::Turn turn(h);
  auto out = make_array<float>({static_cast<size_t>(h.shape().vocab)});
  Drafter::Signals signals{};
  {
    const nb::gil_scoped_release release;
    h.drafter().row(i, previous, out.data(), &signals);
  }
  return nb::make_tuple(out, signals.confidence, signals.top);
}

Out<float> captured(SessionHandle& h) {
  const SessionHandle::Turn turn(h);
  const Drafter& d = h.drafter();
  const auto rows = d.captured();
  auto out = make_array<float>({rows.size() / d.model().main_dim(), static_cast<size_t>(d.model().main_dim())});
  std::copy(rows.begin(), rows.end(), out.data());
  return out;
}

}  // namespace

void bind_draft(nb::class_<SessionHandle>& session) {
  session
      .def("draft_start", &start, nb::arg("anchor"), nb::arg("n_rows"),
           "Runs the drafter's stages for the tokens after `anchor`, which stands at the present position.")
      .def("draft_draw", &draw, nb::arg("sampler"), nb::arg("seed"), nb::arg("anchor"), nb::arg("before"), nb::arg("n"),
           nb::arg("worth"), nb::arg("history") = nb::none(), nb::arg("allowed").noconvert() = nb::none(),
           "The next n drafts behind `anchor` and `before`, drawn with the sampler: (tokens, chance of the likeliest token "
           "of each row). Stops early when the product of the chances so far is not above `worth` of that many drafts.")
      .def("draft_row", &row, nb::arg("i"), nb::arg("previous"),
           "Of the i-th draft after `previous`: logits [vocab], the confidence head's logit, the largest probability.")
      .def_prop_ro("drafter_fault", with([](Session& s) { return s.drafter_fault(); }),
                   "Why the session dropped its drafter itself; empty while it works.")
      .def("drop_drafter", with([](Session& s) { s.drop_drafter(); }))
      .def("draft_settle", [](SessionHandle& h) {
             h.call([&](Session&, Poll* poll) {
               h.drafter().settle(poll, 0);
               return 0;
             });
           }, "Puts the captured rows that a draft would see into its windows, which draft_start() does otherwise.")
      .def_prop_ro("draft_unsettled", with([](Session& s) { return s.drafter() != nullptr ? s.drafter()->unsettled() : 0; }),
                   "How many rows that would be now.")
      .def_prop_ro("draft_context", with([](Session& s) { return s.drafter() != nullptr ? s.drafter()->n_context() : 0; }),
                   "Rows of the target that a draft would see now.")
      .def("draft_captured", &captured)
      .def(
          "inject_fault",
          [](SessionHandle& h, const std::string& point, int64_t after, const std::string& kind) {
            const SessionHandle::Turn turn(h);
            h.session().faults().arm(point, after, kind);
          },
          nb::arg("point"), nb::arg("after") = 0, nb::arg("kind") = "runtime",
          "Tests only: the point fails once, after it was passed `after` times.");
}

}  // namespace ds4::py
