// The part of a session that drafts and draws. A whole block is one call without the GIL: the stages, and for each draft in
// turn its row and its draw; so is a verify step with its draws.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "bindings/draws.h"
#include "bindings/session_handle.h"
#include "decode/decode.h"

namespace ds4::py {

namespace {

SamplingRow mask_of(const std::optional<Tokens>& allowed) {
  static const int32_t nothing = 0;  // an empty mask is a mask: it must not look like none
  if (!allowed) return {};
  const size_t n = allowed->shape(0);
  return {nullptr, nullptr, n == 0 ? &nothing : allowed->data(), n};
}

// start: rows of a new draft; 0: of the one at hand.
std::pair<std::vector<int32_t>, std::vector<float>> draw(SessionHandle& h, Sampler& sampler, uint64_t seed, int32_t anchor,
                                                         const std::vector<int32_t>& before, int n,
                                                         const std::vector<float>& worth, TokenHistory* history,
                                                         const std::optional<Tokens>& allowed, int start, bool settled) {
  const SamplingRow mask = mask_of(allowed);
  Drafts drafts = h.call([&](Session& s, Poll* poll) {
    Drafter& drafter = h.drafter();
    if (start > 0) drafter.start(anchor, start, poll, settled);
    return draft(s, drafter, {sampler, seed, history}, {anchor, before, n, worth, mask.allowed, mask.n_allowed});
  });
  return {std::move(drafts.tokens), std::move(drafts.chances)};
}

void start(SessionHandle& h, int32_t anchor, int n_rows, bool settled) {
  h.call([&](Session&, Poll* poll) {
    h.drafter().start(anchor, n_rows, poll, settled);
    return 0;
  });
}

nb::tuple feed_draw(SessionHandle& h, int32_t token, Sampler& sampler, uint64_t seed, TokenHistory* history, bool chances) {
  const auto feed_one = [&](Session& s, Poll* poll) { return feed(s, {sampler, seed, history, chances}, token, poll); };
  return draw_tuple(h.call(feed_one), sampler, chances);
}

nb::list verify_draw(SessionHandle& h, const std::vector<int32_t>& tokens, Sampler& sampler, uint64_t seed,
                     TokenHistory* history, bool chances) {
  const auto draws = h.call([&](Session& s, Poll* poll) {
    return verify(s, {sampler, seed, history, chances}, tokens.data(), static_cast<int>(tokens.size()), poll, h.taking_back);
  });
  nb::list out;
  for (const Draw& d : draws) out.append(draw_tuple(d, sampler, chances));
  return out;
}

nb::tuple row(SessionHandle& h, int i, int32_t previous) {
  const SessionHandle::Turn turn(h);
  auto out = make_array<float>({static_cast<size_t>(h.shape().vocab)});
  Drafter::Signals signals{};
  {
    const nb::gil_scoped_release release;
    const float* logits = h.drafter().row(i, previous, &signals);
    std::copy(logits, logits + out.size(), out.data());
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
      .def("draft_start", &start, nb::arg("anchor"), nb::arg("n_rows"), nb::arg("settled") = false,
           "Runs the drafter's stages for the tokens after `anchor`, which stands at the present position. settled: its "
           "windows stay as full as they are.")
      .def("draft_draw", &draw, nb::arg("sampler"), nb::arg("seed"), nb::arg("anchor"), nb::arg("before"), nb::arg("n"),
           nb::arg("worth"), nb::arg("history") = nb::none(), nb::arg("allowed").noconvert() = nb::none(), nb::arg("start") = 0,
           nb::arg("settled") = false,
           "start: runs the stages first, as draft_start(anchor, start, settled). The next n drafts behind `anchor` and `before`, drawn with the sampler: (tokens, chance of the likeliest token "
           "of each row). Stops early when the product of the chances so far is not above `worth` of that many drafts.")
      .def("feed_draw", &feed_draw, nb::arg("token"), nb::arg("sampler"), nb::arg("seed"), nb::arg("history") = nb::none(),
           nb::arg("chances") = false,
           "Appends a token and draws the next: as Sampler.draw. The history holds the token already. chances: a fifth item, "
           "how likely the likeliest token was (after bias and penalties, at temperature 1).")
      .def("verify_draw", &verify_draw, nb::arg("tokens"), nb::arg("sampler"), nb::arg("seed"), nb::arg("history") = nb::none(), nb::arg("chances") = false,
           "Appends a token and drafts behind it, draws row after row while the drafts hold, and takes the others back: a "
           "list of draws, one more than drafts that held.")
      .def_prop_ro("taking_back", [](SessionHandle& h) { return h.taking_back; },
                   "Did the last verify_draw() fail while it took drafts back?")
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
      .def("draft_settle_some", [](SessionHandle& h) {
             return h.call([&](Session&, Poll* poll) { return h.drafter().settle_some(poll); });
           }, "The newest of them, half a window at most; how many they were.")
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
