// Single operations of the contract on numpy arrays, for tests: a back end of any shape, and its memory for one call.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/threads.h"
#include "bindings/bindings.h"
#include "engine/backend.h"

namespace ds4::py {

using Ints2 = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bytes2 = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Codes3 = nb::ndarray<const int8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

inline void need(bool ok, const char* what) {
  if (!ok) throw OptionError(std::string("[ops] ") + what);
}

struct Bench {
  // isa: of the CPU, or "metal" in builds that have it.
  Bench(const nb::dict& shape, const std::string& mode, const std::string& isa, int threads);
  Shape shape;
  ThreadPool pool;
  std::unique_ptr<Backend> backend;
};

// Memory of the back end for one call: a device sees no other. Everything comes in as a copy and leaves as one.
class Stage {
 public:
  explicit Stage(Bench& bench) : backend_(*bench.backend) {}
  ~Stage() {
    backend_.abandon();
    for (const auto& [p, bytes] : blocks_) backend_.free(p, bytes);
  }
  Stage(const Stage&) = delete;
  Stage& operator=(const Stage&) = delete;

  template <class T>
  T* room(size_t n) {
    const size_t bytes = (n > 0 ? n : 1) * sizeof(T);
    void* p = backend_.alloc(bytes);
    blocks_.emplace_back(p, bytes);
    return static_cast<T*>(p);
  }
  template <class T>
  T* in(const T* p, size_t n) {
    T* to = room<T>(n);
    if (n > 0) std::memcpy(to, p, n * sizeof(T));
    return to;
  }
  template <class A>
  auto in(const A& array) {
    return in(array.data(), array.size());
  }
  // (type, rows, cols, data, scale or None)
  Matrix matrix(const nb::tuple& t);
  Rope rope(const Floats2& cos, const Floats2& sin) { return {in(cos), in(sin)}; }

  // What was issued is done; its results may be taken.
  void finish() { backend_.wait(); }
  template <class T>
  static Out<T> take(const T* p, std::initializer_list<size_t> shape) {
    auto out = make_array<T>(shape);
    std::memcpy(out.data(), p, out.nbytes());
    return out;
  }

 private:
  Backend& backend_;
  std::vector<std::pair<void*, size_t>> blocks_;
};

void bind_draft_ops(nb::class_<Bench>& bench);
void bind_layer_ops(nb::class_<Bench>& bench);

}  // namespace ds4::py
