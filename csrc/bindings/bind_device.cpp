// What a device can do below the level of a session: copies, empty dispatches, row products. In builds with a device.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>

#include "base/error.h"
#include "bindings/bindings.h"
#ifdef DS4_METAL
#include "engine/builder.h"
#include "metal_host/metal.h"
#endif

namespace ds4::py {

#ifdef DS4_METAL

namespace {

using Seconds = std::tuple<double, double>;

Seconds seconds(const metal::Took& t) { return {t.wall, t.device}; }

void check_times(int times) {
  if (times < 1 || times > 1 << 20) throw OptionError("[bench] times: expected 1 to 1,048,576");
}

Seconds product(metal::DeviceProbe& probe, const std::string& type, int rows, int cols, int n, int times) {
  check_times(times);
  if (rows < 1 || cols < 1 || n < 1) throw OptionError("[bench] expected at least one row, column and activation row");
  const RowType kind = parse_row_type(type);
  const int64_t bytes = row_bytes(kind, cols), scales = scale_row_bytes(kind, cols);
  const nb::gil_scoped_release release;
  return seconds(probe.product(kind, rows, cols, bytes, scales, n, times));
}

}  // namespace

void bind_device(nb::module_& m) {
  using P = metal::DeviceProbe;
  nb::class_<P>(m, "DeviceProbe", "Memory of the device, and dispatches that wait for each other. Times are (wall, device) seconds of all.")
      .def(nb::new_([](int64_t bytes) { return metal::make_probe(bytes); }), nb::arg("bytes"), nb::call_guard<nb::gil_scoped_release>())
      .def("copy",
           [](P& p, int64_t bytes, int times) {
             check_times(times);
             return seconds(p.copy(bytes, times));
           },
           nb::arg("bytes"), nb::arg("times"), nb::call_guard<nb::gil_scoped_release>(), "Copies so many bytes to the other half of the memory.")
      .def("empty",
           [](P& p, int times) {
             check_times(times);
             return seconds(p.empty(times));
           },
           nb::arg("times"), nb::call_guard<nb::gil_scoped_release>(), "Dispatches that do next to nothing.")
      .def("product", &product, nb::arg("type"), nb::arg("rows"), nb::arg("cols"), nb::arg("n"), nb::arg("times"),
           "n activation rows times random matrices, one after the other through the memory.");
}

#else

void bind_device(nb::module_&) {}

#endif

}  // namespace ds4::py
