// What `ds4v41 bench` measures below the level of a session: memory read rate, arithmetic peak, row products.
//
// Every measurement gives wall seconds and CPU seconds (of all threads together, divided by their number): on a machine
// that others use too, the second is what the work took while it ran.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <sys/mman.h>
#include <time.h>

#include <chrono>
#include <vector>

#include "base/error.h"
#include "bindings/bindings.h"
#include "cpu/cpu.h"
#include "engine/builder.h"

namespace ds4::py {

namespace {

using Seconds = std::tuple<double, double>;

double thread_cpu() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

class Probe {
 public:
  Probe(const std::string& isa, int threads, int64_t bytes, bool huge_pages)
      : ops_(cpu::ops(isa)), matrix_(cpu::matrix_class(isa)), pool_(threads), n_threads_(threads), bytes_(static_cast<size_t>(bytes)) {
    if (bytes < (1 << 20)) throw OptionError("[bench] expected at least 1 MiB to touch");
    void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw MemoryPlanError("[bench] the system refused the memory to touch; ask for less");
    data_ = static_cast<uint8_t*>(memory);
#ifdef MADV_HUGEPAGE
    madvise(data_, bytes_, huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#else
    (void)huge_pages;
#endif
    run(static_cast<int64_t>(bytes_ >> 20), [&](int64_t piece) { fill(data_ + (piece << 20), 1 << 20, piece); });
    scales_.assign(1 << 22, 120);
  }
  ~Probe() { munmap(data_, bytes_); }
  Probe(const Probe&) = delete;
  Probe& operator=(const Probe&) = delete;

  Seconds read(int64_t offset, int64_t bytes) {
    check(offset, bytes);
    constexpr int64_t kPiece = 1 << 20;
    return run((bytes + kPiece - 1) / kPiece, [&](int64_t i) {
      const int64_t n = bytes - i * kPiece < kPiece ? bytes - i * kPiece : kPiece;
      sink_ = sink_ ^ ops_.read(data_ + offset + i * kPiece, static_cast<size_t>(n));
    });
  }

  // Fused multiply-adds: GFLOP of all threads in the returned time.
  std::tuple<double, double, double> fma(int64_t rounds) {
    const Seconds s = run(n_threads_ * 8, [&](int64_t) { sink_ = sink_ ^ static_cast<uint64_t>(ops_.fma_chain(rounds)); });
    return {std::get<0>(s), std::get<1>(s), 1e-9 * static_cast<double>(ops_.fma_flops(rounds)) * n_threads_ * 8};
  }

  // The same of the instruction behind the matrix class.
  std::tuple<double, double, double> matrix_peak(int64_t rounds) {
    if (!matrix_.native) throw OptionError("[bench] this instruction set has no matrix unit here");
    const Seconds s = run(n_threads_ * 8, [&](int64_t) { sink_ = sink_ ^ static_cast<uint64_t>(matrix_.chain(rounds)); });
    return {std::get<0>(s), std::get<1>(s), 1e-9 * static_cast<double>(matrix_.flops(rounds)) * n_threads_ * 8};
  }

  // n rows times a matrix of `type` that lies at `offset`; shared among the threads as the engine does it.
  Seconds product(const std::string& type, int rows, int cols, int64_t offset, int n, bool matrix) {
    Matrix m;
    m.type = parse_row_type(type);
    m.rows = rows;
    m.cols = cols;
    m.data = data_ + offset;
    m.row_bytes = row_bytes(m.type, cols);
    m.scale_row_bytes = scale_row_bytes(m.type, cols);
    check(offset, m.row_bytes * rows);
    if (m.scale_row_bytes > 0) {
      if (m.scale_row_bytes * rows > static_cast<int64_t>(scales_.size())) throw OptionError("[bench] matrix: too many scales");
      m.scale = scales_.data();
    }
    make_rows(n, cols);
    out_.resize(static_cast<size_t>(n) * rows);
    const size_t scratch = ((matrix ? matrix_.scratch(cols) : ops_.product_scratch(cols)) + 15) & ~size_t{15};
    if (scratch_.size() < scratch * n_threads_ + 16) scratch_.resize(scratch * n_threads_ + 16);
    float* base = aligned(scratch_.data());
    const int batch = matrix ? matrix_.batch : 96;
    const int64_t block = ops_.block_rows(rows, n_threads_, n);
    const int64_t blocks = (rows + block - 1) / block, batches = (n + batch - 1) / batch;
    return run(blocks * batches, [&](int64_t task, int worker) {
      const int r0 = static_cast<int>(task % blocks * block), i0 = static_cast<int>(task / blocks) * batch;
      const int nr = static_cast<int>(rows - r0 < block ? rows - r0 : block), nx = n - i0 < batch ? n - i0 : batch;
      const float* x = aligned(x_.data()) + static_cast<int64_t>(i0) * cols;
      float* out = out_.data() + static_cast<int64_t>(i0) * rows + r0;
      if (matrix)
        matrix_.block(m, r0, nr, {x, cols, nullptr}, nx, out, rows, base + worker * scratch);
      else
        ops_.product_block(m, r0, nr, x, nx, out, rows, base + worker * scratch);
    });
  }

 private:
  static float* aligned(float* p) { return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(p) + 63) & ~uintptr_t{63}); }

  template <class F>
  Seconds run(int64_t n, F f) {
    std::vector<double> cpu(static_cast<size_t>(n_threads_) * 8, 0.0);  // a cache line for each
    auto body = [&](int64_t i, int worker) {
      const double start = thread_cpu();
      if constexpr (requires { f(i, worker); })
        f(i, worker);
      else
        f(i);
      cpu[static_cast<size_t>(worker) * 8] += thread_cpu() - start;
    };
    const auto start = std::chrono::steady_clock::now();
    parallel_for(pool_, nullptr, n, body);
    const double wall = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    double total = 0.0;
    for (int w = 0; w < n_threads_; ++w) total += cpu[static_cast<size_t>(w) * 8];
    return {wall, total / n_threads_};
  }

  void check(int64_t offset, int64_t bytes) const {
    if (offset < 0 || bytes <= 0 || offset + bytes > static_cast<int64_t>(bytes_))
      throw OptionError("[bench] the range is outside of the memory of this probe");
  }

  // Random bytes in which a half float at any place is finite and moderate.
  static void fill(uint8_t* p, size_t n, int64_t seed) {
    uint64_t s = static_cast<uint64_t>(seed + 1) * 0x9e3779b97f4a7c15ull | 1;
    for (size_t i = 0; i < n; i += 8) {
      s ^= s << 13;
      s ^= s >> 7;
      s ^= s << 17;
      const uint64_t v = s & 0x3f7f3f7f3f7f3f7full;
      std::memcpy(p + i, &v, 8);
    }
  }

  void make_rows(int n, int cols) {
    const size_t want = static_cast<size_t>(n) * cols + 16;
    if (x_.size() >= want) return;
    x_.resize(want);
    uint64_t s = 88172645463325252ull;
    for (auto& v : x_) {
      s ^= s << 13;
      s ^= s >> 7;
      s ^= s << 17;
      v = static_cast<float>(static_cast<int>(s & 255) - 128) / 64.f;  // exact in bfloat16
    }
  }

  const cpu::Ops& ops_;
  const cpu::MatrixClass& matrix_;
  ThreadPool pool_;
  int n_threads_;
  size_t bytes_;
  uint8_t* data_ = nullptr;
  std::vector<uint8_t> scales_;
  std::vector<float> x_, out_, scratch_;
  volatile uint64_t sink_ = 0;
};

}  // namespace

void bind_bench(nb::module_& parent) {
  nb::module_ m = parent.def_submodule("bench", "Measurements below the level of a session.");
  bind_device(m);
  nb::class_<Probe>(m, "Probe", "Memory to touch and threads to touch it with. Times are (wall, CPU per thread) seconds.")
      .def(nb::init<const std::string&, int, int64_t, bool>(), nb::arg("isa"), nb::arg("threads"), nb::arg("bytes"),
           nb::arg("huge_pages"))
      .def("read", &Probe::read, nb::arg("offset"), nb::arg("bytes"), nb::call_guard<nb::gil_scoped_release>(),
           "Reads a range with all threads.")
      .def("fma", &Probe::fma, nb::arg("rounds"), nb::call_guard<nb::gil_scoped_release>(),
           "Fused multiply-adds in registers: (wall, CPU, GFLOP).")
      .def("matrix_peak", &Probe::matrix_peak, nb::arg("rounds"), nb::call_guard<nb::gil_scoped_release>(),
           "The same by the instruction of the matrix class.")
      .def("product", &Probe::product, nb::arg("type"), nb::arg("rows"), nb::arg("cols"), nb::arg("offset"), nb::arg("n"),
           nb::arg("matrix") = false, nb::call_guard<nb::gil_scoped_release>(), "n activation rows times the matrix at an offset.");
}

}  // namespace ds4::py
