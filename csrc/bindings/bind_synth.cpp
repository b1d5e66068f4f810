// Made-up weights: memory of a back end, filled where it lies, and Engram tables whose rows are made when they are asked for.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "base/error.h"
#include "base/process.h"
#include "base/threads.h"
#include "bindings/bindings.h"
#include "convert/synth.h"
#include "engram/engram.h"
#ifdef DS4_METAL
#include "metal_host/metal.h"
#endif

namespace ds4::py {

namespace {

using Table = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using UnitsTuple = std::tuple<uint32_t, uint32_t, uint32_t, uint32_t, uint32_t>;  // kind, bytes, bytes of heads and of codes, key

SynthUnits units_of(const UnitsTuple& t, int64_t table_words) {
  const SynthUnits u{std::get<0>(t), std::get<1>(t), std::get<2>(t), std::get<3>(t), std::get<4>(t)};
  check_units(u, table_words);
  return u;
}

// Memory of one tensor.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual uint8_t* data() const = 0;
  virtual void fill(const SynthUnits& units, const Table& table, uint64_t first, uint64_t n) = 0;
  virtual void read(size_t offset, size_t n, uint8_t* out) const = 0;
  const size_t bytes;

 protected:
  explicit Memory(size_t n) : bytes(n) {}
};

class HostMemory final : public Memory {
 public:
  HostMemory(size_t n, int threads) : Memory(n), threads_(threads), length_(std::max<size_t>(n, 1)) {
    void* p = ::mmap(nullptr, length_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw MemoryPlanError("[synth] the system refused " + std::to_string(n) + " bytes for weights; make a smaller model");
    data_ = static_cast<uint8_t*>(p);
#ifdef MADV_HUGEPAGE
    ::madvise(p, length_, MADV_HUGEPAGE);
#endif
  }
  ~HostMemory() override { ::munmap(data_, length_); }
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  uint8_t* data() const override { return data_; }
  void fill(const SynthUnits& units, const Table& table, uint64_t first, uint64_t n) override {
    constexpr uint64_t kPiece = 1 << 14;
    ThreadPool pool(n > kPiece ? threads_ : 1);
    auto body = [&](int64_t i, int) {
      const uint64_t from = static_cast<uint64_t>(i) * kPiece;
      synth_fill(units, table.data(), first + from, std::min(kPiece, n - from), data_ + from * units.unit_bytes);
    };
    parallel_for(pool, nullptr, static_cast<int64_t>((n + kPiece - 1) / kPiece), body);
  }
  void read(size_t offset, size_t n, uint8_t* out) const override { std::memcpy(out, data_ + offset, n); }

 private:
  const int threads_;
  const size_t length_;
  uint8_t* data_;
};

#ifdef DS4_METAL
class OnDevice final : public Memory {
 public:
  explicit OnDevice(size_t n) : Memory(n), memory_(metal::make_memory(n)) {}
  uint8_t* data() const override { return memory_->data(); }
  void fill(const SynthUnits& units, const Table& table, uint64_t first, uint64_t n) override {
    memory_->fill(units, table.data(), static_cast<int>(table.size()), first, n, 0);
  }
  void read(size_t offset, size_t n, uint8_t* out) const override { memory_->read(offset, n, out); }

 private:
  std::shared_ptr<metal::DeviceMemory> memory_;
};
#endif

std::shared_ptr<Memory> make_memory(const std::string& backend, int64_t n, int threads) {
  if (n < 0 || n > int64_t{1} << 44) throw OptionError("[synth] there is no memory of " + std::to_string(n) + " bytes");
#ifdef DS4_METAL
  if (backend == metal::kName) return std::make_shared<OnDevice>(static_cast<size_t>(n));
#endif
  if (backend != "cpu") throw BackendError("[synth] this build has no back end " + backend);
  return std::make_shared<HostMemory>(static_cast<size_t>(n), threads);
}

void fill(Memory& m, const UnitsTuple& t, const Table& table, int64_t first, int64_t n) {
  const SynthUnits u = units_of(t, static_cast<int64_t>(table.size()));
  if (first < 0 || n < 0 || n > static_cast<int64_t>(m.bytes / u.unit_bytes))
    throw OptionError("[synth] " + std::to_string(n) + " units of " + std::to_string(u.unit_bytes) + " bytes do not fit into " + std::to_string(m.bytes));
  const nb::gil_scoped_release release;
  m.fill(u, table, static_cast<uint64_t>(first), static_cast<uint64_t>(n));
}

Out<uint8_t> read(const Memory& m, int64_t offset, int64_t n) {
  if (offset < 0 || n < 0 || static_cast<size_t>(offset) > m.bytes || static_cast<size_t>(n) > m.bytes - static_cast<size_t>(offset))
    throw OptionError("[synth] the range is outside of this memory");
  auto out = make_array<uint8_t>({static_cast<size_t>(n)});
  const nb::gil_scoped_release release;
  m.read(static_cast<size_t>(offset), static_cast<size_t>(n), out.data());
  return out;
}

// An array over the memory, which it keeps. Of a device it is a name: only the extension may follow its address.
Out<uint8_t> array_of(const std::shared_ptr<Memory>& m) {
  nb::capsule owner(new std::shared_ptr<Memory>(m), [](void* p) noexcept { delete static_cast<std::shared_ptr<Memory>*>(p); });
  const size_t shape[] = {m->bytes};
  return Out<uint8_t>(m->data(), 1, shape, owner);
}

// Rows that follow from their number: what the tables of a made-up model are read with, by "file" and offset.
class MadeRows final : public FileReader {
 public:
  struct Made {
    SynthUnits units;
    std::vector<uint32_t> table;
  };
  explicit MadeRows(std::vector<Made> tables) : tables_(std::move(tables)) {}
  ssize_t read(int fd, void* out, size_t n, int64_t offset) override {
    if (fd < 0 || static_cast<size_t>(fd) >= tables_.size() || offset < 0) return errno = EBADF, -1;
    const Made& made = tables_[static_cast<size_t>(fd)];
    const int64_t size = made.units.unit_bytes, row = offset / size, skip = offset % size;
    thread_local std::vector<uint8_t> one;
    one.resize(static_cast<size_t>(size));
    auto* to = static_cast<uint8_t*>(out);
    if (skip == 0 && n >= static_cast<size_t>(size)) {  // whole rows
      const size_t rows = n / static_cast<size_t>(size);
      synth_fill(made.units, made.table.data(), static_cast<uint64_t>(row), rows, to);
      return static_cast<ssize_t>(rows * static_cast<size_t>(size));
    }
    synth_fill(made.units, made.table.data(), static_cast<uint64_t>(row), 1, one.data());
    const size_t part = std::min(n, static_cast<size_t>(size - skip));
    std::memcpy(to, one.data() + skip, part);
    return static_cast<ssize_t>(part);
  }

 private:
  std::vector<Made> tables_;
};

std::shared_ptr<Engram> made_engram(const std::vector<std::tuple<int64_t, int, UnitsTuple, Table>>& tables, int threads, int64_t cache_bytes) {
  std::vector<TableFiles> files;
  std::vector<MadeRows::Made> made;
  for (const auto& [n_rows, dim, units, table] : tables) {
    const SynthUnits u = units_of(units, static_cast<int64_t>(table.size()));
    if (u.kind != SYNTH_ROW) throw OptionError("[synth] the rows of a table are units of kind " + std::to_string(SYNTH_ROW));
    TableFiles t{n_rows, dim, {"made-up rows", 0, static_cast<int>(u.unit_bytes)}, {}};
    t.made = static_cast<int>(made.size());
    files.push_back(std::move(t));
    made.push_back({u, std::vector<uint32_t>(table.data(), table.data() + table.size())});
  }
  return std::shared_ptr<Engram>(
      new Engram(std::move(files), EngramOptions{false, false, threads, cache_bytes}, std::make_unique<MadeRows>(std::move(made))),
      LeakInFork<Engram>());
}

}  // namespace

void bind_synth(nb::module_& parent) {
  nb::module_ m = parent.def_submodule("synth", "Weights that follow from a seed, made where they are used (benchmarks).");
  nb::class_<Memory>(m, "Memory", "Memory of one tensor, on the host or on a device.")
      .def(nb::new_(&make_memory), nb::arg("backend"), nb::arg("bytes"), nb::arg("threads") = 1)
      .def("fill", &fill, nb::arg("units"), nb::arg("table"), nb::arg("first"), nb::arg("n"),
           "Writes units first .. first + n - 1 to its start. units: (kind, bytes, bytes of heads, bytes of codes, key), as metal/synth_units.h says.")
      .def("read", &read, nb::arg("offset"), nb::arg("n"), "A copy of some of its bytes, also from a device.")
      .def("array", &array_of, "uint8 [bytes] over the memory itself. On a device with memory of its own Python must not look at the values.");
  m.def("engram", &made_engram, nb::arg("tables"), nb::arg("threads") = 16, nb::arg("cache_bytes") = 0,
        "Engram tables without files: (rows, codes a row, units, table) for each.");
}

}  // namespace ds4::py
