// A draw as Python gets it.
#pragma once

#include <nanobind/nanobind.h>

#include "sampling/sampling.h"

namespace ds4::py {

namespace nb = nanobind;

// (token, logprob or None, ((token, logprob), ...), n_kept[, chance of the likeliest token])
inline nb::tuple draw_tuple(const Draw& draw, const Sampler& sampler, bool chance = false) {
  const nb::object logprob = sampler.options().logprobs ? nb::object(nb::float_(draw.logprob)) : nb::object(nb::none());
  nb::list top;
  for (const auto& [token, value] : draw.top_logprobs) top.append(nb::make_tuple(token, value));
  if (chance) return nb::make_tuple(draw.token, logprob, nb::tuple(top), draw.n_kept, draw.chance);
  return nb::make_tuple(draw.token, logprob, nb::tuple(top), draw.n_kept);
}

}  // namespace ds4::py
