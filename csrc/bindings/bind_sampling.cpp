// The submodule `sampling`: one Sampler per set of options, used by ds4v41/sampling.py, which checks options and says
// what is wrong with them. The interpreter lock is released while a row is worked on.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>

#include "base/error.h"
#include "bindings/bindings.h"
#include "bindings/draws.h"
#include "sampling/philox.h"
#include "sampling/sampling.h"

namespace ds4 {
namespace {

namespace nb = nanobind;
using namespace nb::literals;
using py::Floats1;
using py::Tokens;
using Seeds = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Positions = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

SamplingRow row_of(const Sampler& sampler, const Floats1& logits, const TokenHistory* history,
                   const std::optional<Tokens>& allowed) {
  if (logits.shape(0) != static_cast<size_t>(sampler.n_vocab()))
    throw OptionError("logits: expected " + std::to_string(sampler.n_vocab()) + " values (the vocabulary), found " +
                      std::to_string(logits.shape(0)));
  SamplingRow row{logits.data(), history, nullptr, 0};
  if (allowed) {
    static const int32_t nothing = 0;  // an empty mask is a mask: it must not look like none
    row.n_allowed = allowed->shape(0);
    row.allowed = row.n_allowed == 0 ? &nothing : allowed->data();
  }
  return row;
}

void make_sampler(Sampler* self, int32_t n_vocab, float temperature, int64_t top_k, double top_p, float min_p,
                  float presence_penalty, float frequency_penalty, float repetition_penalty,
                  std::vector<std::pair<int32_t, float>> logit_bias, bool logprobs, int top_logprobs, bool plain) {
  new (self) Sampler(n_vocab, {temperature, top_k, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty,
                               std::move(logit_bias), logprobs, top_logprobs, plain});
}

nb::tuple draw(Sampler& sampler, const Floats1& logits, uint64_t seed, int64_t position, const TokenHistory* history,
               const std::optional<Tokens>& allowed, bool chance) {
  const SamplingRow row = row_of(sampler, logits, history, allowed);
  Draw drawn;
  {
    const nb::gil_scoped_release release;
    drawn = sampler.draw(row, seed, position, chance);
  }
  return py::draw_tuple(drawn, sampler, chance);
}

py::Out<int32_t> draw_many(Sampler& sampler, const Floats1& logits, const Seeds& seeds, const Positions& positions,
                           const TokenHistory* history, const std::optional<Tokens>& allowed) {
  const size_t n = seeds.shape(0);
  if (positions.shape(0) != n)
    throw OptionError("positions: expected " + std::to_string(n) + " (one for each seed), found " +
                      std::to_string(positions.shape(0)));
  const SamplingRow row = row_of(sampler, logits, history, allowed);
  auto tokens = py::make_array<int32_t>({n});
  int32_t* out = tokens.data();
  const nb::gil_scoped_release release;
  sampler.draw_many(row, seeds.data(), positions.data(), n, out);
  return tokens;
}

py::Out<float> noise(uint64_t seed, int64_t position, const Tokens& tokens) {
  auto values = py::make_array<float>({tokens.shape(0)});
  for (size_t i = 0; i < tokens.shape(0); ++i) values.data()[i] = gumbel(seed, position, tokens.data()[i]);
  return values;
}

std::vector<uint32_t> philox(const std::vector<uint32_t>& counter, const std::vector<uint32_t>& key) {
  if (counter.size() != 4 || key.size() != 2) throw OptionError("philox: expected 4 counter words and 2 key words");
  const PhiloxBlock block = philox4x32_10({{counter[0], counter[1], counter[2], counter[3]}}, key[0], key[1]);
  return {block.word, block.word + 4};
}

}  // namespace

void bind_sampling(nb::module_& m) {
  nb::module_ sub = m.def_submodule("sampling", "Penalties, filters and keyed draws.");

  nb::class_<TokenHistory>(sub, "TokenHistory", "The tokens that penalties see; see docs/sampling.md.")
      .def(nb::init<int32_t>(), "n_vocab"_a)
      .def("__copy__", [](const TokenHistory& self) { return TokenHistory(self); })
      .def("copy", [](const TokenHistory& self) { return TokenHistory(self); }, "An independent copy, for a fork.")
      .def("add_prompt", [](TokenHistory& self, const Tokens& t) { self.add_prompt(t.data(), t.shape(0)); }, "tokens"_a.noconvert(),
           "Tokens of the prompt (int32): they count for the repetition penalty.")
      .def("add", [](TokenHistory& self, const Tokens& t) { self.add(t.data(), t.shape(0)); }, "tokens"_a.noconvert(),
           "Generated tokens (int32): they count for all penalties.")
      .def("drop", &TokenHistory::drop, "n"_a, "Take back the last n generated tokens.")
      .def_prop_ro("n_vocab", &TokenHistory::n_vocab)
      .def_prop_ro("n_generated", &TokenHistory::n_generated);

  nb::class_<Sampler>(sub, "Sampler", "Draws tokens with one set of options. Safe to share between threads.")
      .def("__init__", &make_sampler, "n_vocab"_a, nb::kw_only(), "temperature"_a = 1.0f, "top_k"_a = 0, "top_p"_a = 1.0,
           "min_p"_a = 0.0f, "presence_penalty"_a = 0.0f, "frequency_penalty"_a = 0.0f, "repetition_penalty"_a = 1.0f,
           "logit_bias"_a = std::vector<std::pair<int32_t, float>>{}, "logprobs"_a = false, "top_logprobs"_a = 0,
           "plain"_a = false)
      .def("draw", &draw, "logits"_a.noconvert(), "seed"_a, "position"_a, "history"_a = nb::none(), "allowed"_a.noconvert() = nb::none(),
           "chance"_a = false,
           "logits [n_vocab] float32, allowed int32 ids -> (token, logprob or None, ((token, logprob), ...), n_kept); with "
           "`chance` a fifth: how likely the likeliest token is after bias, penalties and mask, at temperature 1.")
      .def("draw_many", &draw_many, "logits"_a.noconvert(), "seeds"_a.noconvert(), "positions"_a.noconvert(), "history"_a = nb::none(),
           "allowed"_a.noconvert() = nb::none(), "The same row drawn for every (seed, position): tokens [n] int32.")
      .def_prop_ro("needs_history", &Sampler::needs_history)
      .def_prop_ro("n_vocab", &Sampler::n_vocab);

  sub.def("noise", &noise, "seed"_a, "position"_a, "tokens"_a.noconvert(), "The Gumbel noise of tokens at one position.");
  sub.def("philox", &philox, "counter"_a, "key"_a, "Philox4x32-10 of 4 counter words and 2 key words.");
  sub.def("child_seed", &child_seed, "seed"_a, "index"_a, "The seed of the index-th stream derived from a seed.");
}

}  // namespace ds4
