// Compiled once, for the baseline instruction set.
#include "base/error.h"
#include "cpu/cpu.h"

namespace ds4::cpu {

#define DS4_DECLARE(isa)                                                        \
  namespace isa {                                                               \
  Backend* make(const Shape& shape, Activations activations, ThreadPool& pool); \
  const Ops* ops();                                                             \
  }
#ifdef DS4_HAVE_AVX512
DS4_DECLARE(avx512)
#endif
#ifdef DS4_HAVE_AVX2
DS4_DECLARE(avx2)
#endif
#ifdef DS4_HAVE_NEON
DS4_DECLARE(neon)
#endif
DS4_DECLARE(plain)

namespace {

struct Isa {
  const char* name;
  bool (*supported)();
  Backend* (*make)(const Shape&, Activations, ThreadPool&);
  const Ops* (*ops)();
};

const Isa kIsas[] = {
#ifdef DS4_HAVE_AVX512
    {"avx512",
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
              __builtin_cpu_supports("f16c") != 0;
     },
     avx512::make, avx512::ops},
#endif
#ifdef DS4_HAVE_AVX2
    {"avx2", [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") != 0; }, avx2::make, avx2::ops},
#endif
#ifdef DS4_HAVE_NEON
    {"neon", [] { return true; }, neon::make, neon::ops},
#endif
    {"plain", [] { return true; }, plain::make, plain::ops},
};

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Isa& isa : kIsas)
    if (isa.supported()) names.emplace_back(isa.name);
  return names;
}

namespace {

const Isa& find_isa(const std::string& name) {
  for (const Isa& isa : kIsas)
    if ((name == "auto" || name == isa.name) && isa.supported()) return isa;
  std::string known;
  for (const auto& n : available_isas()) known += (known.empty() ? "" : ", ") + n;
  throw BackendError("[backend] the instruction set '" + name + "' is not available here; expected one of: auto, " + known);
}

}  // namespace

std::unique_ptr<Backend> make_backend(const std::string& isa, const Shape& shape, Activations activations,
                                      ThreadPool& pool) {
  return std::unique_ptr<Backend>(find_isa(isa).make(shape, activations, pool));
}

const Ops& ops(const std::string& isa) { return *find_isa(isa).ops(); }

}  // namespace ds4::cpu
