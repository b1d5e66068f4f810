// The only folder that knows nanobind. Each bind_x adds one room of the extension.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <optional>

#include "engram/hash.h"

namespace ds4::py {

namespace nb = nanobind;

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats1 = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats2 = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats3 = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
// In a history: the token was computed in the matrix class (docs/formats-store.md).
constexpr int32_t kMatrixTag = 1 << 30;

using Tokens = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Out = nb::ndarray<nb::numpy, T>;

// A new numpy array that owns its memory.
template <class T>
Out<T> make_array(std::initializer_list<size_t> shape) {
  size_t n = 1;
  for (size_t d : shape) n *= d;
  T* data = new T[n]();
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return Out<T>(data, shape.size(), shape.begin(), owner);
}

void bind_errors(nb::module_& m);
void bind_engram(nb::module_& m);
void bind_model(nb::module_& m);
void bind_session(nb::module_& m);
void bind_ops(nb::module_& m);
void bind_select(nb::module_& m);
void bind_bench(nb::module_& m);
void bind_device(nb::module_& m);  // a room of bench
void bind_synth(nb::module_& m);
void bind_standin(nb::module_& m);  // only in builds with the stand-in for Metal

// Checked EngramHash::rows for the tokens after the first `history`: [n - history, columns].
Out<int64_t> hash_rows(const EngramHash& hash, int table, const Tokens& tokens, int64_t history,
                       const std::optional<Bytes>& dead);

}  // namespace ds4::py

namespace ds4 {
void bind_convert(nanobind::module_& m);
void bind_sampling(nanobind::module_& m);
}  // namespace ds4
