// The inner loop of XXH64: its four sums are independent, so they fit into one vector where 64-bit products do.
#include "kv/xxh64.h"

namespace ds4 {

namespace {

template <class V>
V turned(V x, int r) {
  return (x << r) | (x >> (64 - r));
}

void stripes_plain(uint64_t* sums, const uint8_t* p, size_t n) {
  uint64_t v[4], word;
  std::memcpy(v, sums, sizeof v);
  for (; n > 0; --n)
    for (uint64_t& x : v) {
      std::memcpy(&word, p, sizeof word);
      x = turned(x + word * Xxh64::kP2, 31) * Xxh64::kP1;
      p += sizeof word;
    }
  std::memcpy(sums, v, sizeof v);
}

#if defined(__x86_64__)
// A scalar product is one a cycle at best, shared by the two threads of a core: 4 bytes a cycle.
__attribute__((target("avx512dq,avx512vl"))) void stripes_vector(uint64_t* sums, const uint8_t* p, size_t n) {
  using Vector = uint64_t __attribute__((vector_size(32)));
  Vector v, words;
  std::memcpy(&v, sums, sizeof v);
  for (; n > 0; --n, p += sizeof words) {
    std::memcpy(&words, p, sizeof words);
    const Vector x = v + words * Xxh64::kP2;
    v = ((x << 31) | (x >> 33)) * Xxh64::kP1;
  }
  std::memcpy(sums, &v, sizeof v);
}

bool has_vectors() { return __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"); }
#else
void stripes_vector(uint64_t* sums, const uint8_t* p, size_t n) { stripes_plain(sums, p, n); }
bool has_vectors() { return false; }
#endif

}  // namespace

void xxh64_stripes(uint64_t* sums, const uint8_t* data, size_t n) {
  static const bool vectors = has_vectors();
  (vectors ? stripes_vector : stripes_plain)(sums, data, n);
}

}  // namespace ds4
