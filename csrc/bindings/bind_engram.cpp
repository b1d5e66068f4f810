// Engram on its own: hash, tables, requests; for the model's builder, for measurements and for tests.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <memory>
#include <optional>

#include "base/error.h"
#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "engram/engram.h"
#include "engram/faults.h"
#include "engram/hash.h"

namespace ds4::py {

namespace {

using Rows = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
// rows, codes a row, then path, offset and bytes a row of the codes and of the scales ("", 0, 0: in the same rows)
using TableTuple = std::tuple<int64_t, int, std::string, int64_t, int, std::string, int64_t, int>;

// Signals only, for calls that wait without a session.
class SignalPoll final : public Poll {
 public:
  bool stop() override {
    sleep_if_the_interpreter_ends();
    nb::gil_scoped_acquire gil;
    raised_ = PyErr_CheckSignals() != 0;
    if (raised_) error_ = std::make_unique<nb::python_error>();
    return raised_;
  }
  template <class F>
  void guard(F f) {
    try {
      const GilRelease release;
      f();
    } catch (const Cancelled&) {
      if (!raised_) throw;
      error_->restore();
      throw nb::python_error();
    }
  }

 private:
  bool raised_ = false;
  std::unique_ptr<nb::python_error> error_;
};

// A request that owns the memory it writes to.
struct RowRequest {
  std::shared_ptr<Engram> engram;
  std::unique_ptr<uint8_t[]> data;
  size_t rows, row_bytes;
  Engram::Ticket ticket;
  ~RowRequest() {
    if (ticket) engram->abandon(ticket);
  }
};

Urgency parse_urgency(const std::string& name) {
  if (name == "step") return Urgency::step;
  if (name == "chunk") return Urgency::chunk;
  if (name == "ahead") return Urgency::ahead;
  throw OptionError("[engram] urgency: expected step, chunk or ahead, got '" + name + "'");
}

template <class T>
void take(const nb::dict& from, const char* name, T& into) {
  if (from.contains(name)) into = nb::cast<T>(from[name]);
}

std::unique_ptr<FileReader> reader_of(const std::optional<nb::dict>& faults) {
  if (!faults) return std::make_unique<FileReader>();
  FaultPlan plan;
  take(*faults, "delay", plan.delay);
  take(*faults, "delay_share", plan.delay_share);
  take(*faults, "jitter", plan.jitter);
  take(*faults, "bytes_per_second", plan.bytes_per_second);
  take(*faults, "short_reads", plan.short_reads);
  take(*faults, "interrupt_every", plan.interrupt_every);
  take(*faults, "fail_after", plan.fail_after);
  take(*faults, "fail_errno", plan.fail_errno);
  take(*faults, "seed", plan.seed);
  return std::make_unique<FaultyReader>(plan);
}

std::shared_ptr<Engram> make_engram(const std::vector<TableTuple>& tables, bool ram, bool direct, int threads,
                                    int64_t cache_bytes, const std::optional<nb::dict>& faults) {
  std::vector<TableFiles> files;
  for (const auto& [n_rows, dim, path, offset, row_bytes, scale_path, scale_offset, scale_row_bytes] : tables)
    files.push_back({n_rows, dim, {path, offset, row_bytes}, {scale_path, scale_offset, scale_row_bytes}});
  std::shared_ptr<Engram> engram(
      new Engram(std::move(files), EngramOptions{ram, direct, threads, cache_bytes}, reader_of(faults)),
      LeakInFork<Engram>());
  SignalPoll poll;
  poll.guard([&] { engram->load(&poll); });
  return engram;
}

nb::dict counters(const Engram& engram) {
  const EngramCounters c = engram.counters();
  nb::dict d;
  d["rows"] = c.rows;
  d["unique"] = c.unique;
  d["hits"] = c.hits;
  d["reads"] = c.reads;
  d["bytes"] = c.bytes;
  d["read_seconds"] = c.read_seconds;
  d["latency"] = std::vector<int64_t>(c.latency.begin(), c.latency.end());
  return d;
}

RowRequest* request(const std::shared_ptr<Engram>& self, int table, const Rows& rows, const std::string& urgency) {
  if (table < 0 || table >= self->n_tables()) throw OptionError("[engram] there is no table " + std::to_string(table));
  const size_t row_bytes = static_cast<size_t>(self->table(table).row_bytes());
  auto r = std::make_unique<RowRequest>();
  r->engram = self;
  r->rows = rows.size();
  r->row_bytes = row_bytes;
  r->data.reset(new uint8_t[rows.size() * row_bytes]());
  r->ticket = self->request(table, std::vector<int64_t>(rows.data(), rows.data() + rows.size()), r->data.get(),
                            parse_urgency(urgency));
  return r.release();
}

// The rows, and the seconds that this call waited.
nb::tuple wait(RowRequest& r) {
  SignalPoll poll;
  double seconds = 0;
  poll.guard([&] { seconds = r.ticket->wait(&poll); });
  auto out = make_array<uint8_t>({r.rows, r.row_bytes});
  std::copy(r.data.get(), r.data.get() + r.rows * r.row_bytes, out.data());
  return nb::make_tuple(out, seconds);
}

// Hits of each read when keys [n] (not 0) go one by one through an empty cache that holds `n_rows` rows.
Out<uint8_t> cache_replay(int64_t n_rows, const Rows& keys) {
  RowCache probe(1 << 20, 1);
  RowCache cache(probe.bytes() / probe.n_rows() * n_rows, 1);
  auto hit = make_array<uint8_t>({keys.size()});
  uint8_t row = 0;
  const nb::gil_scoped_release release;
  for (size_t i = 0; i < keys.size(); ++i) {
    const uint64_t key = static_cast<uint64_t>(keys.data()[i]);
    hit.data()[i] = cache.get(key, &row);
    if (hit.data()[i] == 0) cache.put(key, &row);
  }
  return hit;
}

void bind_hash(nb::module_& m) {
  nb::class_<EngramHash>(m, "EngramHash", "Row numbers of token ids.")
      .def(nb::init<int, int, std::vector<uint32_t>, uint32_t, std::vector<std::vector<uint64_t>>,
                    std::vector<std::vector<uint64_t>>, std::vector<std::vector<uint64_t>>>(),
           nb::arg("max_ngram"), nb::arg("n_heads"), nb::arg("token_map"), nb::arg("pad"), nb::arg("multipliers"),
           nb::arg("primes"), nb::arg("offsets"))
      .def_prop_ro("columns", &EngramHash::columns)
      .def(
          "rows",
          &hash_rows,
          nb::arg("table"), nb::arg("tokens"), nb::arg("history") = 0, nb::arg("dead") = nb::none(),
          "Row numbers that each position after the first `history` reads: int64 [n - history, columns].");
}

}  // namespace

Out<int64_t> hash_rows(const EngramHash& hash, int table, const Tokens& tokens, int64_t history,
                       const std::optional<Bytes>& dead) {
  const int64_t n = static_cast<int64_t>(tokens.size());
  if (table < 0 || table >= hash.n_tables()) throw OptionError("[engram] there is no table " + std::to_string(table));
  if (history < 0 || history > n) throw OptionError("[engram] history: expected 0 .. the number of tokens");
  for (int64_t i = 0; i < n; ++i)
    if (tokens.data()[i] < 0 || tokens.data()[i] >= hash.vocab())
      throw TokenError("[engram] token id " + std::to_string(tokens.data()[i]) + " is out of range");
  if (dead && dead->size() != tokens.size()) throw OptionError("[engram] dead: one byte a token");
  auto out = make_array<int64_t>({static_cast<size_t>(n - history), static_cast<size_t>(hash.columns())});
  hash.rows(table, tokens.data(), history, n - history, dead ? dead->data() : nullptr, out.data());
  return out;
}

void bind_engram(nb::module_& m) {
  bind_hash(m);
  nb::class_<RowRequest>(m, "EngramRequest", "Rows on their way.")
      .def("wait", &wait, "Returns (uint8 [n, row bytes], seconds waited); raises EngramError.")
      .def("abandon", [](RowRequest& r) { r.engram->abandon(r.ticket); })
      .def_prop_ro("done", [](const RowRequest& r) { return r.ticket->done(); });
  nb::class_<Engram>(m, "Engram", "Tables, hot rows and reading threads; shared by the sessions of a model.")
      .def(nb::new_(&make_engram), nb::arg("tables"), nb::arg("ram") = false, nb::arg("direct") = false,
           nb::arg("threads") = 64, nb::arg("cache_bytes") = 0, nb::arg("faults") = nb::none(),
           "tables: (rows, codes a row, path, offset, row bytes, scale path, scale offset, scale row bytes). "
           "faults: what reads do wrong on purpose, for tests (csrc/engram/faults.h).")
      .def("request", &request, nb::arg("table"), nb::arg("rows"), nb::arg("urgency") = "step", nb::keep_alive<0, 1>())
      .def("counters", &counters)
      .def_prop_ro("in_memory", [](const Engram& e) { return e.options().ram; })
      .def_prop_ro("made", [](const Engram& e) { return e.n_tables() > 0 && e.table(0).made(); }, "No file: rows are made up when they are asked for.")
      .def_prop_ro("direct", [](const Engram& e) { return e.options().direct; })
      .def_prop_ro("cache_bytes", [](const Engram& e) { return e.cache().bytes(); })
      .def_prop_ro("cache_budget", [](const Engram& e) { return e.options().cache_bytes; })
      .def_prop_ro("cache_rows", [](const Engram& e) { return e.cache().n_rows(); })
      .def_prop_ro("cached", [](const Engram& e) { return e.cache().used(); })
      .def_prop_ro("most_threads", [](const Engram& e) { return e.options().threads; })
      .def_prop_ro("threads", [](const Engram& e) { return e.n_threads(); })
      .def_prop_ro("n_rows", [](const Engram& e) {
        std::vector<int64_t> n;
        for (int i = 0; i < e.n_tables(); ++i) n.push_back(e.table(i).n_rows());
        return n;
      })
      .def_prop_ro("bytes", [](const Engram& e) {
        int64_t sum = 0;
        for (int i = 0; i < e.n_tables(); ++i) sum += e.table(i).bytes();
        return sum;
      });
  m.def("engram_cache_replay", &cache_replay, nb::arg("n_rows"), nb::arg("keys"),
        "Which of the keys (int64, not 0) a cache of n_rows rows would have had: uint8 [n].");
}

}  // namespace ds4::py
