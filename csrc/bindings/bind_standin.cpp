// Single kernels on numpy arrays through the stand-in for Metal, for tests. Only in builds with DS4_STANDIN.
#if DS4_STANDIN
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <Metal/Metal.hpp>
#include <atomic>
#include <bit>
#include <cstring>
#include <list>
#include <map>

#include "base/error.h"
#include "bindings/bindings.h"
#include "metal_standin/launch.h"
#include "metal_standin/options.h"
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
    Launch* const alone[] = {&l};
    mark_watched(alone);
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

// ---------------------------------------------------------------- through the classes of Metal

NS::SharedPtr<NS::String> text_of(const std::string& s) { return NS::TransferPtr(NS::String::alloc()->init(s.c_str(), NS::UTF8StringEncoding)); }

[[noreturn]] void refuse(NS::Error* error, const char* what) {
  throw BackendError(error != nullptr ? error->localizedDescription()->utf8String() : what);
}

NS::SharedPtr<MTL::ComputePipelineState> pipeline_of(MTL::Device* device, const std::string& kernel, const nb::dict& constants) {
  const Entry* entry = find_kernel(kernel);
  if (entry == nullptr) throw OptionError("[stand-in] there is no kernel '" + kernel + "'");
  NS::Error* error = nullptr;
  auto compile = NS::TransferPtr(MTL::CompileOptions::alloc()->init());
  compile->setMathMode(MTL::MathModeSafe);
  const char* source = "";
  for (const Compiled& c : compiled())
    if (c.fast == entry->family) source = c.source;
  auto library = NS::TransferPtr(device->newLibrary(text_of(source).get(), compile.get(), &error));
  if (!library) refuse(error, "no library");
  auto values = NS::TransferPtr(MTL::FunctionConstantValues::alloc()->init());
  static const MTL::DataType kTypes[] = {MTL::DataTypeBool, MTL::DataTypeInt, MTL::DataTypeUInt, MTL::DataTypeFloat};
  for (auto item : constants) {
    const ConstantValue v = constant_of(*entry->family, nb::cast<int>(item.first), item.second);
    values->setConstantValue(&v.bits, kTypes[static_cast<int>(v.type)], v.index);
  }
  auto function = NS::TransferPtr(library->newFunction(text_of(kernel).get(), values.get(), &error));
  if (!function) refuse(error, "no function");
  auto pipeline = NS::TransferPtr(device->newComputePipelineState(function.get(), &error));
  if (!pipeline) refuse(error, "no pipeline");
  return pipeline;
}

using Memory = std::map<std::string, NS::SharedPtr<MTL::Buffer>>;

void bind_argument(MTL::ComputeCommandEncoder* encoder, const Memory& memory, nb::handle key, nb::handle value) {
  const auto index = nb::cast<NS::UInteger>(key);
  if (nb::isinstance<nb::bytes>(value)) {
    const auto bytes = nb::cast<nb::bytes>(value);
    return encoder->setBytes(bytes.data(), bytes.size(), index);
  }
  std::string name;
  uint64_t offset = 0;
  if (nb::isinstance<nb::str>(value)) name = nb::cast<std::string>(value);
  else std::tie(name, offset) = nb::cast<std::tuple<std::string, uint64_t>>(value);
  const auto it = memory.find(name);
  if (it == memory.end()) throw OptionError("[stand-in] no buffer is called '" + name + "'");
  encoder->setBuffer(it->second.get(), offset, index);
}

void encode_step(MTL::Device* device, MTL::ComputeCommandEncoder* encoder, const Memory& memory, const nb::dict& step) {
  if (step.contains("barrier")) {
    if (nb::isinstance<nb::str>(step["barrier"])) {
      const MTL::Resource* resource = memory.at(nb::cast<std::string>(step["barrier"])).get();
      return encoder->memoryBarrier(&resource, 1);
    }
    return encoder->memoryBarrier(MTL::BarrierScopeBuffers);
  }
  const auto part = [&](const char* name) { return step.contains(name) ? nb::cast<nb::dict>(step[name]) : nb::dict(); };
  encoder->setComputePipelineState(pipeline_of(device, nb::cast<std::string>(step["kernel"]), part("constants")).get());
  for (auto item : part("buffers")) bind_argument(encoder, memory, item.first, item.second);
  for (auto item : part("threadgroup"))
    encoder->setThreadgroupMemoryLength(nb::cast<NS::UInteger>(item.second), nb::cast<NS::UInteger>(item.first));
  const auto size = [](nb::handle h) {
    const auto t = nb::cast<Three>(h);
    return MTL::Size(std::get<0>(t), std::get<1>(t), std::get<2>(t));
  };
  if (step.contains("threads")) encoder->dispatchThreads(size(step["threads"]), size(step["group_size"]));
  else encoder->dispatchThreadgroups(size(step["groups"]), size(step["group_size"]));
}

// Runs steps in one encoder, as a host would. Arrays are copied in and out of buffers of their own.
void encode(const nb::list& steps, const nb::dict& buffers, bool concurrent) {
  auto pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
  auto device = NS::TransferPtr(MTL::CreateSystemDefaultDevice());
  auto queue = NS::TransferPtr(device->newCommandQueue());
  std::list<View> views;
  Memory memory;
  for (auto item : buffers) {
    const Binding b = views.emplace_back(item.second).binding();
    memory[nb::cast<std::string>(item.first)] = NS::TransferPtr(device->newBuffer(b.data, b.bytes, MTL::ResourceStorageModeShared));
  }
  MTL::CommandBuffer* commands = queue->commandBuffer();
  MTL::ComputeCommandEncoder* encoder = commands->computeCommandEncoder(concurrent ? MTL::DispatchTypeConcurrent : MTL::DispatchTypeSerial);
  for (nb::handle step : steps) encode_step(device.get(), encoder, memory, nb::cast<nb::dict>(step));
  encoder->endEncoding();
  commands->commit();
  {
    nb::gil_scoped_release unlocked;
    commands->waitUntilCompleted();
  }
  auto view = views.begin();
  for (auto item : buffers) {
    const Binding b = (view++)->binding();
    if (!b.read_only) std::memcpy(b.data, memory[nb::cast<std::string>(item.first)]->contents(), b.bytes);
  }
  if (commands->status() == MTL::CommandBufferStatusError) refuse(commands->error(), "failed");
}

void set(const std::optional<std::string>& order, std::optional<bool> checked, std::optional<bool> execute,
         std::optional<double> patience) {
  Options o = options();
  if (order) o.order = parse_order(*order);
  if (checked) o.checked = *checked;
  if (execute) o.execute = *execute;
  if (patience) o.patience = *patience;
  set_options(o);
}

nb::dict counted(bool reset) {
  const Counters c = counters(reset);
  nb::dict d;
  d["command_buffers"] = c.command_buffers;
  d["encoders"] = c.encoders;
  d["dispatches"] = c.dispatches;
  d["steps"] = c.steps;
  d["barriers"] = c.barriers;
  d["host_waits"] = c.host_waits;
  d["event_waits"] = c.event_waits;
  d["event_signals"] = c.event_signals;
  d["threads"] = c.threads;
  d["unseen_errors"] = c.unseen_errors;
  return d;
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
  s.attr("has_checked") = has_checked();
  s.def("kernels", &kernels);
  s.def("encode", &encode, nb::arg("steps"), nb::arg("buffers"), nb::arg("concurrent") = false);
  s.def("set_options", &set, nb::arg("order") = nb::none(), nb::arg("checked") = nb::none(), nb::arg("execute") = nb::none(),
        nb::arg("patience") = nb::none());
  s.def("counters", &counted, nb::arg("reset") = false);
  s.def("signature", &signature, nb::arg("kernel"));
}

}  // namespace ds4::py
#endif
