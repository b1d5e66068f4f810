// Compiled once, for the baseline instruction set.
#include <cstdlib>
#include <string>

#include "base/error.h"
#include "cpu/cpu.h"
#include "cpu/pairs.h"

namespace ds4::cpu {

#define DS4_DECLARE(isa)                                                        \
  namespace isa {                                                               \
  Backend* make(const Shape&, Activations, ThreadPool&, const MatrixClass&);    \
  const Ops* ops();                                                             \
  const MatrixClass* matrix_class();                                            \
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
#ifdef DS4_HAVE_AVX512BF16
namespace avx512bf16 {
const MatrixClass* matrix_class();
bool pair_block(const Matrix& m, int r0, int nr, MatrixRows x, int n, float* out, int64_t ldo, float* scratch);
}
#endif

namespace {

struct Isa {
  const char* name;
  bool (*supported)();
  Backend* (*make)(const Shape&, Activations, ThreadPool&, const MatrixClass&);
  const Ops* (*ops)();
  const MatrixClass* (*matrix)();
};

const Isa kIsas[] = {
#ifdef DS4_HAVE_AVX512
    {"avx512",
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
              __builtin_cpu_supports("f16c") != 0;
     },
     avx512::make, avx512::ops, avx512::matrix_class},
#endif
#ifdef DS4_HAVE_AVX2
    {"avx2", [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") != 0; }, avx2::make, avx2::ops, avx2::matrix_class},
#endif
#ifdef DS4_HAVE_NEON
    {"neon", [] { return true; }, neon::make, neon::ops, neon::matrix_class},
#endif
    {"plain", [] { return true; }, plain::make, plain::ops, plain::matrix_class},
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
  return std::unique_ptr<Backend>(find_isa(isa).make(shape, activations, pool, matrix_class(isa)));
}

const Ops& ops(const std::string& isa) { return *find_isa(isa).ops(); }

// AVX-512-BF16. For tests DS4_CPU_BF16=never does without, as processors do that have the others only.
bool has_bf16_products() {
#ifdef DS4_HAVE_AVX512
  static const bool has = [] {
    const char* asked = std::getenv("DS4_CPU_BF16");
    return __builtin_cpu_supports("avx512bf16") && (asked == nullptr || std::string(asked) != "never");
  }();
  return has;
#else
  return false;
#endif
}

const MatrixClass& matrix_class(const std::string& isa) {
  const Isa& found = find_isa(isa);
#ifdef DS4_HAVE_AVX512BF16
  if (std::string(found.name) == "avx512" && has_bf16_products()) return *avx512bf16::matrix_class();
#endif
  return *found.matrix();
}

std::string matrix_missing(const std::string& isa) {
  const MatrixClass& matrix = matrix_class(isa);
  if (!matrix.native) return std::string("cpu/") + find_isa(isa).name + " has no matrix unit here";
  const FlushSubnormals flush;
  return matrix.agrees() ? "" : "VDPBF16PS of this processor does not round as the class is defined";
}

PairRows pair_rows() {
#ifdef DS4_HAVE_AVX512BF16
  static const PairRows found = [] {
    const bool there = has_bf16_products() && __builtin_cpu_supports("avx512vbmi");
    return there && matrix_missing("avx512").empty() ? avx512bf16::pair_block : nullptr;
  }();
  return found;
#else
  return nullptr;
#endif
}

}  // namespace ds4::cpu
