#ifdef __linux__
#include <malloc.h>
#endif

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>

#include "base/error.h"
#include "bindings/bindings.h"
#include "cpu/cpu.h"
#include "engine/builder.h"
#include "engine/engram_feed.h"
#include "engine/rope.h"
#include "engine/scratch.h"
#include "kv/state.h"
#ifdef DS4_METAL
#include "metal_host/metal.h"
#endif
#ifdef DS4_CUDA
#include "cuda/times.h"
#endif

namespace ds4::py {

namespace {

Activations parse_activations(const std::string& name) {
  if (name == "bf16") return Activations::bf16;
  if (name == "fp8") return Activations::fp8;
  if (name == "fp32") return Activations::fp32;
  throw OptionError("[model] activations: expected bf16, fp8 or fp32, got '" + name + "'");
}

template <class T>
T get(const nb::dict& d, const char* key) {
  if (!d.contains(key)) throw ConfigError(std::string("[model] the shape lacks ") + key);
  return nb::cast<T>(d[key]);
}

}  // namespace

Shape shape_from(const nb::dict& d) {
  Shape s;
#define DS4_FIELD(name) s.name = get<decltype(s.name)>(d, #name)
  DS4_FIELD(vocab);
  DS4_FIELD(hidden);
  DS4_FIELD(n_layers);
  DS4_FIELD(n_heads);
  DS4_FIELD(head_dim);
  DS4_FIELD(rope_dim);
  DS4_FIELD(q_rank);
  DS4_FIELD(o_rank);
  DS4_FIELD(o_groups);
  DS4_FIELD(n_experts);
  DS4_FIELD(top_k);
  DS4_FIELD(expert_dim);
  DS4_FIELD(route_scale);
  DS4_FIELD(swiglu_limit);
  DS4_FIELD(norm_eps);
  DS4_FIELD(window);
  DS4_FIELD(index_heads);
  DS4_FIELD(index_dim);
  DS4_FIELD(index_topk);
  DS4_FIELD(candidate_source);
  DS4_FIELD(candidate_blocks);
  DS4_FIELD(candidate_block_size);
  DS4_FIELD(n_streams);
  DS4_FIELD(sinkhorn_iters);
  DS4_FIELD(hc_eps);
  DS4_FIELD(engram_columns);
  DS4_FIELD(engram_dim);
  DS4_FIELD(max_context);
  DS4_FIELD(rope_base);
  DS4_FIELD(compress_rope_base);
  DS4_FIELD(yarn_factor);
  DS4_FIELD(yarn_beta_fast);
  DS4_FIELD(yarn_beta_slow);
  DS4_FIELD(yarn_original);
  DS4_FIELD(ratio);
  DS4_FIELD(kv_source);
  DS4_FIELD(index_source);
  DS4_FIELD(engram_index);
  DS4_FIELD(source_layer);
#undef DS4_FIELD
  const size_t n = static_cast<size_t>(s.n_layers);
  if (s.ratio.size() != n || s.kv_source.size() != n || s.index_source.size() != n || s.engram_index.size() != n)
    throw ConfigError("[model] the per-layer lists must have one entry a layer");
  return s;
}

namespace {

// The builder, and the Python objects that own the mapped memory.
struct Builder {
  ModelBuilder builder;
  std::vector<nb::object> owners;
};

// Python's handle of a model: keeps the mapped memory alive as long as anything uses the weights.
struct ModelHandle {
  std::shared_ptr<const Model> model;
  std::vector<nb::object> owners;
};

struct DrafterBuilderHandle {
  DrafterBuilder builder;
  std::vector<nb::object> owners;  // the target's handle first
};

struct DrafterHandle {
  std::shared_ptr<const DrafterModel> drafter;
  std::vector<nb::object> owners;
};

void bind_drafter_builder(nb::module_& m) {
  using B = DrafterBuilderHandle;
  nb::class_<B>(m, "DrafterBuilder", "Puts a drafter together from named tensors.")
      .def(
          "__init__",
          [](B* self, nb::object target, int block, int noise, int markov_rank, std::vector<int> target_layers, int n_stages,
             int n_experts, int top_k) {
            DraftSizes sizes{block, noise, markov_rank, std::move(target_layers)};
            new (self) B{DrafterBuilder(nb::cast<ModelHandle&>(target).model, std::move(sizes), n_stages, n_experts, top_k), {target}};
          },
          nb::arg("target"), nb::kw_only(), nb::arg("block"), nb::arg("noise"), nb::arg("markov_rank"), nb::arg("target_layers"),
          nb::arg("n_stages"), nb::arg("n_experts"), nb::arg("top_k"))
      .def(
          "matrix",
          [](B& self, const std::string& name, const std::string& type, int64_t rows, int64_t cols, const Bytes& data,
             const std::optional<Bytes>& scale) {
            self.builder.matrix(name, type, rows, cols, data.data(), static_cast<int64_t>(data.size()),
                                scale ? scale->data() : nullptr, scale ? static_cast<int64_t>(scale->size()) : 0);
          },
          nb::arg("name"), nb::arg("type"), nb::arg("rows"), nb::arg("cols"), nb::arg("data"), nb::arg("scale") = nb::none())
      .def("vector", [](B& self, const std::string& name,
                        const Floats1& data) { self.builder.vector(name, data.data(), static_cast<int64_t>(data.size())); })
      .def("keep", [](B& self, nb::object owner) { self.owners.push_back(std::move(owner)); })
      .def("build", [](B& self) { return new DrafterHandle{self.builder.build(), std::move(self.owners)}; });
  nb::class_<DrafterHandle>(m, "Drafter", "A drafter's weights, shared by the sessions of its target.")
      .def_prop_ro("session_bytes",
                   [](const DrafterHandle& h) { return static_cast<int64_t>(Drafter::bytes(*h.drafter)); },
                   "Bytes that a session takes for it, beside its rings and what operations take.")
      .def_prop_ro("working_bytes",
                   [](const DrafterHandle& h) {
                     const DrafterModel& d = *h.drafter;
                     const int block = d.sizes.block;
#ifdef DS4_METAL
                     if (d.target->isa == metal::kName) return metal::draft_working_bytes(d.shape, d.weights, block, Drafter::kBatch);
#endif
                     return cpu::draft_working_bytes(d.shape, d.weights, block, Drafter::kBatch, d.target->pool->n_threads());
                   },
                   "Bytes that the operations of a session's drafter take beside them, at most.")
      .def_prop_ro("block", [](const DrafterHandle& h) { return h.drafter->sizes.block; })
      .def_prop_ro("n_stages", [](const DrafterHandle& h) { return h.drafter->n_stages(); });
}

void bind_builder(nb::module_& m) {
  nb::class_<Builder>(m, "ModelBuilder", "Puts a model together from named tensors.")
      .def(
          "__init__",
          [](Builder* self, const nb::dict& shape, const std::string& activations) {
            new (self) Builder{ModelBuilder(shape_from(shape), parse_activations(activations)), {}};
          },
          nb::arg("shape"), nb::arg("activations"))
      .def(
          "matrix",
          [](Builder& self, const std::string& name, const std::string& type, int64_t rows, int64_t cols,
             const Bytes& data, const std::optional<Bytes>& scale) {
            self.builder.matrix(name, type, rows, cols, data.data(), static_cast<int64_t>(data.size()),
                                scale ? scale->data() : nullptr, scale ? static_cast<int64_t>(scale->size()) : 0);
          },
          nb::arg("name"), nb::arg("type"), nb::arg("rows"), nb::arg("cols"), nb::arg("data"),
          nb::arg("scale") = nb::none())
      .def("vector",
           [](Builder& self, const std::string& name, const Floats1& data) {
             self.builder.vector(name, data.data(), static_cast<int64_t>(data.size()));
           })
      .def("hash", [](Builder& self, const EngramHash& hash) { self.builder.hash(hash); })
      .def("hash",
           [](Builder& self, int max_ngram, int n_heads, std::vector<uint32_t> token_map, uint32_t pad,
              std::vector<std::vector<uint64_t>> multipliers, std::vector<std::vector<uint64_t>> primes,
              std::vector<std::vector<uint64_t>> offsets) {
             self.builder.hash(EngramHash(max_ngram, n_heads, std::move(token_map), pad, std::move(multipliers),
                                          std::move(primes), std::move(offsets)));
           },
           nb::arg("max_ngram"), nb::arg("n_heads"), nb::arg("token_map"), nb::arg("pad"), nb::arg("multipliers"),
           nb::arg("primes"), nb::arg("offsets"))
      .def("engram", [](Builder& self, std::shared_ptr<Engram> engram) { self.builder.engram(std::move(engram)); })
      .def("keep", [](Builder& self, nb::object owner) { self.owners.push_back(std::move(owner)); },
           "Keeps an object (a memory map) alive as long as the model.")
      .def(
          "build",
          [](Builder& self, const std::string& isa, int threads) {
            return new ModelHandle{self.builder.build(isa, threads), std::move(self.owners)};
          },
          nb::arg("isa"), nb::arg("threads"));
}

}  // namespace

std::shared_ptr<const DrafterModel> drafter_of(nb::handle handle) {
  return handle.is_none() ? nullptr : nb::cast<DrafterHandle&>(handle).drafter;
}

std::shared_ptr<const Model> model_of(nb::handle handle) { return nb::cast<ModelHandle&>(handle).model; }

void bind_model(nb::module_& m) {
  bind_builder(m);
  bind_drafter_builder(m);
  nb::class_<ModelHandle>(m, "Model", "Weights and worker threads, shared by sessions.")
      .def_prop_ro("isa", [](const ModelHandle& h) { return std::string(h.model->make_backend()->name()); })
      .def_prop_ro("threads", [](const ModelHandle& h) { return h.model->pool->n_threads(); })
      .def("engram_rows",
           [](const ModelHandle& h, int table, const Tokens& tokens, const std::optional<Bytes>& dead) {
             return hash_rows(h.model->hash, table, tokens, 0, dead);
           },
           nb::arg("table"), nb::arg("tokens"), nb::arg("dead") = nb::none(), "EngramHash.rows of a new line of tokens.")
      .def_prop_ro("hash", [](const ModelHandle& h) { return h.model->hash; }, "The n-gram hash: EngramHash.")
      .def_prop_ro("engram", [](const ModelHandle& h) { return h.model->engram; }, "Engram, or None.");
  m.def(
      "device_missing",
      [](const std::string& backend) {
#ifdef DS4_METAL
        if (backend == metal::kName) return metal::why_not();
#endif
        return "this build has no " + backend + " back end";
      },
      nb::arg("backend"), "Why there is no back end of this name (metal, cuda); empty when there is one.");
#ifdef DS4_METAL
  m.def(
      "metal_counters",
      [] {
        const metal::Counters c = metal::counters();
        nb::dict d, kernels;
        d["dispatches"] = c.dispatches;
        d["levels"] = c.levels;
        d["command_buffers"] = c.command_buffers;
        d["waits"] = c.waits;
        d["latches"] = c.latches;
        for (const auto& [name, n] : metal::counters_by_kernel()) kernels[name.c_str()] = nb::make_tuple(n.dispatches, n.levels);
        d["kernels"] = kernels;
        return d;
      },
      "What the Metal back ends of this process issued so far: dispatches, levels of them that had to wait for each other, "
      "command buffers, waits; and (dispatches, levels that they opened) by kernel.");
#endif
#ifdef DS4_CUDA
  m.def(
      "cuda_graphs",
      [] {
        const cuda::GraphCounts c = cuda::graph_counts();
        nb::dict d;
        d["made"] = c.made, d["launched"] = c.launched, d["nodes"] = c.nodes, d["updated"] = c.updated;
        return d;
      },
      "With DS4_CUDA_GRAPHS=1: graphs made and launched, kernels in those that were launched, and of them, those whose arguments were set anew.");
  m.def(
      "cuda_times",
      [] {
        nb::list all;
        for (const cuda::KernelTime& t : cuda::take_times()) all.append(nb::make_tuple(t.launch, t.dispatches, t.seconds));
        return all;
      },
      "With DS4_CUDA_TIMES=1: (kernel [function constants] grid, dispatches, seconds of the device) since it was last called, longest first.");
#endif
  m.def("matrix_missing", &cpu::matrix_missing, nb::arg("isa"), "Why this instruction set has no fast matrix class here; empty when it has.");
  m.def(
      "give_back_memory",
      [] {
#ifdef __GLIBC__
        malloc_trim(0);
#endif
      },
      nb::call_guard<nb::gil_scoped_release>(), "Returns pages of freed small objects to the system, where the allocator keeps them.");
  m.def("cpu_isas", &cpu::available_isas, "Instruction sets of this build that this machine has, best first.");
  m.def(
      "memory_plan",
      [](const nb::dict& shape, const std::string& activations, int64_t context, int64_t retain, int64_t chunk, int extra_windows,
         int threads, [[maybe_unused]] const std::string& backend, bool matrix) {
        const Shape s = shape_from(shape);
        const CacheBytes b = cache_bytes(s, context, retain, chunk, extra_windows);
        nb::dict d;
        d["window"] = b.window;
        d["compressed"] = b.compressed;
        d["pending"] = b.pending;
        d["scratch"] = static_cast<int64_t>(lay_out(s, parse_activations(activations), chunk, 1, nullptr, nullptr, nullptr).total()) +
                       feed_bytes(s, chunk);
        int64_t working = cpu::working_bytes(s, chunk, context, threads, matrix);
#ifdef DS4_METAL
        if (backend == metal::kName) working = metal::working_bytes(s, chunk, context);
#endif
        d["working"] = working;
        return d;
      },
      nb::arg("shape"), nb::arg("activations"), nb::arg("context"), nb::arg("retain"), nb::arg("chunk"),
      nb::arg("extra_windows") = 0, nb::arg("threads") = 0, nb::arg("backend") = "auto", nb::arg("matrix") = false,
      "Bytes of a session: caches reserved for the whole context, scratch of one chunk, and what operations take beside it: on "
      "the CPU with so many worker threads (0: none), or on a device.");
  m.def(
      "rope",
      [](const nb::dict& shape, bool yarn, int64_t first, int n) {
        const auto f = rope_frequencies(shape_from(shape), yarn);
        auto freq = make_array<float>({f.size()});
        for (size_t i = 0; i < f.size(); ++i) freq.data()[i] = f[i];
        auto cos = make_array<float>({static_cast<size_t>(n), f.size()});
        auto sin = make_array<float>({static_cast<size_t>(n), f.size()});
        fill_rope(f, first, n, cos.data(), sin.data());
        return nb::make_tuple(freq, cos, sin);
      },
      nb::arg("shape"), nb::arg("yarn"), nb::arg("first"), nb::arg("n"), "Frequencies, cos and sin of positions.");
}

}  // namespace ds4::py
