// Single operations on numpy arrays, for tests. Each takes the instruction set by name.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "base/error.h"
#include "bindings/bindings.h"
#include "cpu/cpu.h"
#include "engine/builder.h"

namespace ds4::py {

namespace {

using cpu::ops;

cpu::Unary parse_unary(const std::string& name) {
  static const char* const kNames[] = {"exp", "log", "sigmoid", "softplus", "silu", "bf16", "to_e4m3", "rsqrt"};
  for (int i = 0; i < 8; ++i)
    if (name == kNames[i]) return static_cast<cpu::Unary>(i);
  throw OptionError("[ops] unknown function '" + name + "'");
}

cpu::RowFormat parse_format(const std::string& name) {
  if (name == "window") return cpu::RowFormat::window;
  if (name == "compressed") return cpu::RowFormat::compressed;
  if (name == "index") return cpu::RowFormat::index;
  throw OptionError("[ops] unknown row format '" + name + "'");
}

size_t packed_bytes(cpu::RowFormat f, size_t dim) {
  switch (f) {
    case cpu::RowFormat::window: return dim + dim / 32;
    case cpu::RowFormat::compressed: return dim / 2 + dim / 16;
    case cpu::RowFormat::index: return dim / 2 + dim / 32;
  }
  return 0;
}

Matrix matrix_of(const std::string& type, size_t rows, size_t cols, const Bytes& data, const std::optional<Bytes>& scale) {
  Matrix m;
  m.type = parse_row_type(type);
  m.rows = static_cast<int>(rows);
  m.cols = static_cast<int>(cols);
  m.data = data.data();
  m.row_bytes = row_bytes(m.type, m.cols);
  m.scale_row_bytes = scale_row_bytes(m.type, m.cols);
  m.scale = scale ? scale->data() : nullptr;
  const int64_t scale_rows = m.type == RowType::fp8_block ? (m.rows + 31) / 32 : m.rows;
  if (static_cast<int64_t>(data.size()) != m.row_bytes * m.rows ||
      static_cast<int64_t>(scale ? scale->size() : 0) != m.scale_row_bytes * scale_rows)
    throw OptionError("[ops] matrix: sizes of data and scales do not fit the format");
  return m;
}

void need(bool ok, const char* what) {
  if (!ok) throw OptionError(std::string("[ops] ") + what);
}

Out<float> unary(const std::string& isa, const std::string& name, const Floats1& x) {
  auto out = make_array<float>({x.size()});
  FlushSubnormals flush;
  ops(isa).unary(parse_unary(name), x.data(), static_cast<int64_t>(x.size()), out.data());
  return out;
}

Out<float> product(const std::string& isa, const std::string& type, size_t rows, const Bytes& data,
                   const std::optional<Bytes>& scale, const Floats2& x) {
  const Matrix m = matrix_of(type, rows, x.shape(1), data, scale);
  std::vector<float> scratch(ops(isa).product_scratch(m.cols));
  auto out = make_array<float>({x.shape(0), rows});
  FlushSubnormals flush;
  ops(isa).product(m, x.data(), static_cast<int>(x.shape(0)), out.data(), scratch.data());
  return out;
}

Out<float> matrix_product(const std::string& isa, const std::string& type, size_t rows, const Bytes& data,
                          const std::optional<Bytes>& scale, const Floats2& x) {
  const Matrix m = matrix_of(type, rows, x.shape(1), data, scale);
  const cpu::MatrixClass& c = cpu::matrix_class(isa);
  std::vector<float> scratch(c.scratch(m.cols));
  auto out = make_array<float>({x.shape(0), rows});
  FlushSubnormals flush;
  c.block(m, 0, m.rows, {x.data(), m.cols, nullptr}, static_cast<int>(x.shape(0)), out.data(), m.rows, scratch.data());
  return out;
}

Out<float> decode(const std::string& isa, const std::string& type, size_t rows, size_t cols, const Bytes& data,
                  const std::optional<Bytes>& scale) {
  const Matrix m = matrix_of(type, rows, cols, data, scale);
  auto out = make_array<float>({rows, cols});
  FlushSubnormals flush;
  for (size_t r = 0; r < rows; ++r) ops(isa).decode(m, static_cast<int>(r), out.data() + r * cols);
  return out;
}

Out<float> norm(const std::string& isa, const Floats2& x, const Floats1& weight, float eps, bool round) {
  need(x.shape(1) == weight.size(), "norm: one weight a column");
  auto out = make_array<float>({x.shape(0), x.shape(1)});
  FlushSubnormals flush;
  for (size_t i = 0; i < x.shape(0); ++i)
    ops(isa).norm(x.data() + i * x.shape(1), weight.data(), static_cast<int>(x.shape(1)), eps, round, out.data() + i * x.shape(1));
  return out;
}

Out<float> rotate(const std::string& isa, const Floats2& x, const Floats2& cos, const Floats2& sin, bool inverse, bool round) {
  need(cos.shape(0) == x.shape(0) && sin.shape(0) == x.shape(0) && cos.shape(1) == sin.shape(1) &&
           2 * cos.shape(1) <= x.shape(1),
       "rotate: cos and sin [n, rope_dim / 2]");
  auto out = make_array<float>({x.shape(0), x.shape(1)});
  std::copy(x.data(), x.data() + x.size(), out.data());
  FlushSubnormals flush;
  for (size_t i = 0; i < x.shape(0); ++i)
    ops(isa).rotate(out.data() + i * x.shape(1), static_cast<int>(x.shape(1)), static_cast<int>(2 * cos.shape(1)),
                    cos.data() + i * cos.shape(1), sin.data() + i * cos.shape(1), inverse ? -1.f : 1.f, round);
  return out;
}

Out<float> fake_q8(const std::string& isa, const Floats2& x) {
  auto out = make_array<float>({x.shape(0), x.shape(1)});
  std::copy(x.data(), x.data() + x.size(), out.data());
  FlushSubnormals flush;
  for (size_t i = 0; i < x.shape(0); ++i) ops(isa).fake_q8(out.data() + i * x.shape(1), static_cast<int>(x.shape(1)));
  return out;
}

Out<uint8_t> pack(const std::string& isa, const std::string& format, const Floats2& x) {
  const auto f = parse_format(format);
  need(x.shape(1) % 32 == 0, "pack: a multiple of 32 columns");
  const size_t bytes = packed_bytes(f, x.shape(1));
  auto out = make_array<uint8_t>({x.shape(0), bytes});
  FlushSubnormals flush;
  for (size_t i = 0; i < x.shape(0); ++i)
    ops(isa).pack(f, x.data() + i * x.shape(1), static_cast<int>(x.shape(1)), out.data() + i * bytes);
  return out;
}

Out<float> unpack(const std::string& isa, const std::string& format, const Bytes& rows, size_t dim) {
  const auto f = parse_format(format);
  const size_t bytes = packed_bytes(f, dim);
  need(dim % 32 == 0 && bytes > 0 && rows.size() % bytes == 0, "unpack: rows and dim do not fit");
  auto out = make_array<float>({rows.size() / bytes, dim});
  FlushSubnormals flush;
  for (size_t i = 0; i < rows.size() / bytes; ++i)
    ops(isa).unpack(f, rows.data() + i * bytes, static_cast<int>(dim), out.data() + i * dim);
  return out;
}

nb::tuple hc_coefficients(const std::string& isa, const Floats2& z, const Floats1& scale, const Floats1& base, int c, int iters, float eps) {
  need(c >= 1 && c <= 8 && z.shape(1) == static_cast<size_t>((2 + c) * c) && base.size() == z.shape(1) && scale.size() == 3,
       "hc_coefficients: shapes");
  const size_t n = z.shape(0), cc = static_cast<size_t>(c);
  auto pre = make_array<float>({n, cc});
  auto post = make_array<float>({n, cc});
  auto comb = make_array<float>({n, cc, cc});
  FlushSubnormals flush;
  for (size_t i = 0; i < n; ++i)
    ops(isa).hc_coefficients(z.data() + i * z.shape(1), scale.data(), base.data(), c, iters, eps, pre.data() + i * cc,
                             post.data() + i * cc, comb.data() + i * cc * cc);
  return nb::make_tuple(pre, post, comb);
}

Out<float> collapse(const std::string& isa, const Floats3& stream, const Floats2& mix, bool round) {
  need(mix.shape(0) == stream.shape(0) && mix.shape(1) == stream.shape(1), "collapse: mix [n, streams]");
  const size_t n = stream.shape(0), c = stream.shape(1), d = stream.shape(2);
  auto out = make_array<float>({n, d});
  FlushSubnormals flush;
  for (size_t i = 0; i < n; ++i)
    ops(isa).collapse(stream.data() + i * c * d, mix.data() + i * c, static_cast<int>(c), static_cast<int>(d), round, out.data() + i * d);
  return out;
}

Out<float> expand(const std::string& isa, const Floats2& y, const Floats3& stream, const Floats2& post, const Floats3& comb, bool round) {
  const size_t n = stream.shape(0), c = stream.shape(1), d = stream.shape(2);
  need(c <= 8 && y.shape(0) == n && y.shape(1) == d && post.shape(0) == n && post.shape(1) == c && comb.shape(0) == n &&
           comb.shape(1) == c && comb.shape(2) == c,
       "expand: shapes");
  auto out = make_array<float>({n, c, d});
  std::copy(stream.data(), stream.data() + stream.size(), out.data());
  FlushSubnormals flush;
  for (size_t i = 0; i < n; ++i)
    ops(isa).expand(y.data() + i * d, post.data() + i * c, comb.data() + i * c * c, static_cast<int>(c), static_cast<int>(d), round,
                    out.data() + i * c * d);
  return out;
}

Out<int32_t> top_k(const std::string& isa, const Floats1& scores, int64_t k) {
  need(k >= 0, "top_k: k must not be negative");
  const int64_t n = static_cast<int64_t>(scores.size());
  // Kept between calls, as the engine keeps its own: fresh pages would cost more than the choice.
  thread_local std::vector<int32_t> picked;
  thread_local std::vector<uint64_t> bin;
  if (picked.size() < static_cast<size_t>(n) + 1) {
    picked.resize(static_cast<size_t>(n) + 1);
    bin.resize(static_cast<size_t>(n) + 1);
  }
  FlushSubnormals flush;
  const int64_t got = k == 0 ? 0 : ops(isa).top_k(scores.data(), n, k, picked.data(), bin.data());
  auto out = make_array<int32_t>({static_cast<size_t>(got)});
  std::copy(picked.begin(), picked.begin() + got, out.data());
  return out;
}

// The selector alone: what ops.top_k does, with bad input refused.
Out<int32_t> select(const Floats1& scores, int64_t k, const std::string& isa) {
  if (k < 0) throw OptionError("[select] k: expected 0 or more, found " + std::to_string(k));
  const int64_t n = static_cast<int64_t>(scores.size());
  if (n > INT32_MAX) throw OptionError("[select] scores: expected at most 2147483647, found " + std::to_string(n));
  for (int64_t i = 0; i < n; ++i)
    if (scores.data()[i] != scores.data()[i])
      throw OptionError("[select] scores: NaN at index " + std::to_string(i) + " has no place in an order; replace it, by minus infinity if it must never be chosen");
  return top_k(isa, scores, k);
}

}  // namespace

void bind_contract_ops(nb::module_& m);

void bind_select(nb::module_& m) {
  m.def("select", &select, nb::arg("scores"), nb::arg("k"), nb::arg("isa") = "auto",
        "The positions, ascending, of the k highest of `scores` (float32, one dimension): higher first, then the lower index. -0 equals 0, "
        "subnormals are zeros, minus infinity is never chosen, so fewer than k may come back. NaN is refused: OptionError names its index.");
}

void bind_ops(nb::module_& parent) {
  nb::module_ m = parent.def_submodule("ops", "Single operations, for tests.");
  m.def("isas", &cpu::available_isas);
  m.def("unary", &unary, nb::arg("isa"), nb::arg("name"), nb::arg("x"));
  m.def("product", &product, nb::arg("isa"), nb::arg("type"), nb::arg("rows"), nb::arg("data"),
        nb::arg("scale").none(), nb::arg("x"), "x [n, cols] times a matrix of `rows` rows: [n, rows], canonical order.");
  m.def("matrix_product", &matrix_product, nb::arg("isa"), nb::arg("type"), nb::arg("rows"), nb::arg("data"),
        nb::arg("scale").none(), nb::arg("x"), "The same in the matrix class, emulated where there is no instruction for it.");
  m.def("matrix_native", [](const std::string& isa) { return cpu::matrix_class(isa).native; }, nb::arg("isa"),
        "Is it computed by the instruction that the class is made for?");
  m.def("decode", &decode, nb::arg("isa"), nb::arg("type"), nb::arg("rows"), nb::arg("cols"), nb::arg("data"),
        nb::arg("scale") = nb::none(), "The matrix as float32 [rows, cols].");
  m.def("norm", &norm, nb::arg("isa"), nb::arg("x"), nb::arg("weight"), nb::arg("eps"), nb::arg("round"));
  m.def("rotate", &rotate, nb::arg("isa"), nb::arg("x"), nb::arg("cos"), nb::arg("sin"), nb::arg("inverse"), nb::arg("round"));
  m.def("fake_q8", &fake_q8, nb::arg("isa"), nb::arg("x"));
  m.def("pack", &pack, nb::arg("isa"), nb::arg("format"), nb::arg("x"));
  m.def("unpack", &unpack, nb::arg("isa"), nb::arg("format"), nb::arg("rows"), nb::arg("dim"));
  m.def("hc_coefficients", &hc_coefficients, nb::arg("isa"), nb::arg("z"), nb::arg("scale"), nb::arg("base"),
        nb::arg("streams"), nb::arg("iters"), nb::arg("eps"));
  m.def("collapse", &collapse, nb::arg("isa"), nb::arg("stream"), nb::arg("mix"), nb::arg("round"));
  m.def("expand", &expand, nb::arg("isa"), nb::arg("y"), nb::arg("stream"), nb::arg("post"), nb::arg("comb"), nb::arg("round"));
  m.def("top_k", &top_k, nb::arg("isa"), nb::arg("scores"), nb::arg("k"));
  bind_contract_ops(m);
}

}  // namespace ds4::py
