// Python face of csrc/convert: numpy bytes in, numpy bytes out. The interpreter lock is released while threads work.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <string>

#include "../convert/transcode.h"

namespace nb = nanobind;

namespace ds4 {
namespace {

using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutBytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

[[noreturn]] void refuse(const std::string& text) { throw nb::value_error(text.c_str()); }

void need_bytes(const char* what, std::size_t found, std::size_t expected) {
  if (found != expected) {
    refuse(std::string(what) + " has " + std::to_string(found) + " bytes, expected " + std::to_string(expected));
  }
}

convert::RowType row_type(const std::string& name) {
  const auto type = convert::row_type_of(name);
  if (!type) refuse("target type \"" + name + "\" is not one of Q8_0, Q4_K, MXFP4, F16, BF16, F32");
  return *type;
}

convert::SourceRows source_rows(const std::string& name, const Bytes& codes, const std::optional<Bytes>& scales,
                                std::size_t rows, std::size_t cols) {
  const auto type = convert::source_type_of(name);
  if (!type) refuse("source type \"" + name + "\" is not one of F32, F16, BF16, F8_E4M3, I8");
  if (rows == 0 || cols == 0 || rows > (std::size_t{1} << 40) || cols > (std::size_t{1} << 24)) {
    refuse("rows and cols must be positive, at most 2^40 and 2^24");
  }
  if (*type == convert::SourceType::fp4_row32 && cols % 32 != 0)
    refuse("packed fp4 rows must be a multiple of 32 values");
  need_bytes("codes", codes.size(), rows * convert::source_row_bytes(*type, cols));
  need_bytes("scales", scales ? scales->size() : 0, convert::source_scale_bytes(*type, rows, cols));
  return {*type, codes.data(), scales ? scales->data() : nullptr, rows, cols};
}

template <class Work>
auto run(Work work) {
  try {
    nb::gil_scoped_release release;
    return work();
  } catch (const convert::ConvertFault& fault) {
    // Python gets the position as arguments: ValueError(text, row, column).
    nb::gil_scoped_acquire acquire;
    const nb::object error = nb::borrow(PyExc_ValueError)(fault.what(), fault.row, fault.col);
    PyErr_SetObject(PyExc_ValueError, error.ptr());
    throw nb::python_error();
  }
}

std::size_t transcode(const std::string& source, const Bytes& codes, const std::optional<Bytes>& scales,
                      std::size_t rows, std::size_t cols, const std::string& target, const std::optional<OutBytes>& out,
                      int threads, bool search) {
  const convert::SourceRows input = source_rows(source, codes, scales, rows, cols);
  const convert::RowType type = row_type(target);
  const std::size_t block = convert::block_shape(type).values;
  if (cols % block != 0)
    refuse(target + " rows must be a multiple of " + std::to_string(block) + " values, found " + std::to_string(cols));
  if (out) need_bytes("out", out->size(), rows * convert::row_bytes(type, cols));
  if (threads < 1 || threads > 1024) refuse("threads must be 1 to 1024");
  std::uint8_t* bytes = out ? out->data() : nullptr;
  const auto mode = search ? convert::Q4kMode::search : convert::Q4kMode::min_max;
  return run([&] { return convert::transcode(input, type, mode, bytes, threads); });
}

void pack_engram_rows(const Bytes& codes, const Bytes& scales, std::size_t rows, std::size_t dim, const OutBytes& out,
                      int threads) {
  if (rows == 0 || dim == 0 || dim % 32 != 0 || dim > 65536 || rows > (std::size_t{1} << 40)) {
    refuse("rows must be positive and dim a positive multiple of 32, at most 65536");
  }
  if (threads < 1 || threads > 1024) refuse("threads must be 1 to 1024");
  need_bytes("codes", codes.size(), rows * dim);
  need_bytes("scales", scales.size(), rows * (dim / 32));
  need_bytes("out", out.size(), rows * (dim + dim / 32));
  run([&] { convert::pack_engram_rows(codes.data(), scales.data(), rows, dim, out.data(), threads); });
}

std::size_t row_bytes(const std::string& target, std::size_t cols) {
  const convert::RowType type = row_type(target);
  if (cols == 0 || cols % convert::block_shape(type).values != 0) {
    refuse(target + " rows must be a positive multiple of " + std::to_string(convert::block_shape(type).values) +
           " values");
  }
  return convert::row_bytes(type, cols);
}

}  // namespace

// Makes the submodule `convert` of the extension.
void bind_convert(nb::module_& m) {
  nb::module_ sub = m.def_submodule("convert", "Row encoders of the converters.");
  sub.def("transcode", &transcode, nb::arg("source"), nb::arg("codes"), nb::arg("scales").none(), nb::arg("rows"),
          nb::arg("cols"), nb::arg("target"), nb::arg("out").none(), nb::kw_only(), nb::arg("threads") = 1,
          nb::arg("search") = true,
          "Encode `rows` official rows of `cols` values (source type F32, F16, BF16, F8_E4M3 with 32x32 block scales, "
          "or I8 = packed\n"
          "fp4 with row scales) to rows of `target`, written to `out` (None: only check and count). All arrays are "
          "flat uint8.\n"
          "Returns how many values F16 or BF16 could not hold exactly. Raises ValueError(text, row, column) for NaN, "
          "infinity and\n"
          "overflow. The bytes do not depend on `threads`. search=False uses the plain min/max encoder for Q4_K.");
  sub.def("pack_engram_rows", &pack_engram_rows, nb::arg("codes"), nb::arg("scales"), nb::arg("rows"), nb::arg("dim"),
          nb::arg("out"), nb::kw_only(), nb::arg("threads") = 1,
          "Put e4m3 codes [rows, dim] and e8m0 scales [rows, dim/32] side by side. Raises ValueError(text, row, "
          "column) for NaN.");
  sub.def("row_bytes", &row_bytes, nb::arg("target"), nb::arg("cols"), "Bytes of one row of `cols` values.");
}

}  // namespace ds4
