// Single kernels on numpy arrays through the stand-in for Metal, for tests. Only in builds with DS4_STANDIN.
#if DS4_STANDIN
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <bit>
#include <list>

#include "base/error.h"
#include "bindings/bindings.h"
#include "metal_standin/launch.h"
#include "metal_standin/registry.h"
#include "metal_standin/shadow.h"

namespace ds4::py {

namespace {

using namespace standin;
using Three = std::tuple<uint32_t, uint32_t, uint32_t>;

Grid3 grid_of(const Three& t) { return {std::get<0>(t), std::get<1>(t), std::get<2>(t)}; }

// Memory of a Python object for as long as the launch runs.
class View {
 public:
  explicit View(nb::handle object) {
    writable_ = PyObject_GetBuffer(object.ptr(), &view_, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS) == 0;
    if (writable_) return;
    PyErr_Clear();
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_C_CONTIGUOUS) != 0) nb::raise_python_error();
  }
  ~View() { PyBuffer_Release(&view_); }
  View(const View&) = delete;
  View& operator=(const View&) = delete;
  Binding binding() const { return {view_.buf, static_cast<uint64_t>(view_.len), !writable_, 0}; }

 private:
  Py_buffer view_;
  bool writable_;
};

int checked_index(nb::handle key, const char* what) {
  const int index = nb::cast<int>(key);
  if (index < 0 || index >= kMaxBuffers)
    throw OptionError(std::string("[stand-in] ") + what + " index: expected 0 to 30, found " + std::to_string(index));
  return index;
}

ConstantValue constant_of(const Family& family, int index, nb::handle value) {
  for (int i = 0; i < family.n_constants; ++i) {
    const FunctionConstant& c = family.constants[i];
    if (c.index != index) continue;
    uint32_t bits = 0;
    switch (c.type) {
      case ConstantType::boolean: bits = nb::cast<bool>(value) ? 1 : 0; break;
      case ConstantType::i32: bits = static_cast<uint32_t>(nb::cast<int32_t>(value)); break;
      case ConstantType::u32: bits = nb::cast<uint32_t>(value); break;
      case ConstantType::f32: bits = std::bit_cast<uint32_t>(nb::cast<float>(value)); break;
    }
    return {static_cast<uint16_t>(index), c.type, bits};
  }
  throw OptionError("[stand-in] function constant " + std::to_string(index) + " does not exist in family " + family.name);
}

void launch(const std::string& kernel, const Three& groups, const Three& group_size, const nb::dict& buffers,
            const nb::dict& threadgroup, const nb::dict& constants, const std::string& order, bool checked) {
  const Entry* entry = find_kernel(kernel);
  if (entry == nullptr) throw OptionError("[stand-in] there is no kernel '" + kernel + "'");
  if (checked && entry->checked == nullptr) throw OptionError("[stand-in] this build has no checked kernels");
  static std::atomic<uint64_t> serial{0};
  Launch l;
  l.kernel = entry->kernel;
  l.family = entry->family;
  l.checked = entry->checked;
  l.checked_family = entry->checked_family;
  l.groups = grid_of(groups);
  l.group_size = grid_of(group_size);
  l.grid = {l.groups.x * l.group_size.x, l.groups.y * l.group_size.y, l.groups.z * l.group_size.z};
  l.order = parse_order(order);
  l.serial = ++serial;
  std::list<View> views;
  for (auto item : buffers) l.buffers[checked_index(item.first, "buffer")] = views.emplace_back(item.second).binding();
  for (auto item : threadgroup)
    l.threadgroup_bytes[checked_index(item.first, "threadgroup memory")] = nb::cast<uint32_t>(item.second);
  for (auto item : constants) l.constants.push_back(constant_of(*entry->family, nb::cast<int>(item.first), item.second));
  Report report;
  if (validate(l, report)) {
    nb::gil_scoped_release unlocked;
    Shadow shadow;
    execute(l, checked ? &shadow : nullptr, report);
  }
  if (!report.empty()) throw BackendError("[stand-in] " + report.text());
}

nb::list kernels() {
  nb::list names;
  for (const Entry& e : all_kernels()) names.append(e.kernel->name);
  return names;
}

// name -> family, whether its threads synchronise, and its arguments: (name, kind, index, size).
nb::dict signature(const std::string& kernel) {
  const Entry* entry = find_kernel(kernel);
  if (entry == nullptr) throw OptionError("[stand-in] there is no kernel '" + kernel + "'");
  static const char* const kKinds[] = {"device const", "device", "constant", "threadgroup"};
  nb::list params;
  for (int i = 0; i < entry->kernel->n_params; ++i) {
    const Param& p = entry->kernel->params[i];
    params.append(nb::make_tuple(p.name, kKinds[static_cast<int>(p.kind)], static_cast<int>(p.index), p.size));
  }
  nb::dict d;
  d["family"] = entry->family->name;
  d["synchronises"] = entry->kernel->synchronises;
  d["params"] = params;
  return d;
}

}  // namespace

void bind_standin(nb::module_& m) {
  nb::module_ s = m.def_submodule("standin", "Metal kernels on this machine's CPU, for tests.");
  s.def("launch", &launch, nb::arg("kernel"), nb::arg("groups"), nb::arg("group_size"), nb::arg("buffers"),
        nb::arg("threadgroup") = nb::dict(), nb::arg("constants") = nb::dict(), nb::arg("order") = "forward",
        nb::arg("checked") = false);
  s.def("kernels", &kernels);
  s.def("signature", &signature, nb::arg("kernel"));
}

}  // namespace ds4::py
#endif
