// State as bytes: rows, frontiers, memory, checksums.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/session_handle.h"
#include "engine/cone.h"
#include "kv/xxh64.h"

namespace ds4::py {

Shape shape_from(const nb::dict& d);

namespace {

Out<uint8_t> array_of(const std::vector<uint8_t>& bytes) {
  auto out = make_array<uint8_t>({bytes.size()});
  std::memcpy(out.data(), bytes.data(), bytes.size());
  return out;
}

Out<uint8_t> export_rows(SessionHandle& h, int64_t begin, int64_t end) {
  const SessionHandle::Turn turn(h);
  const State& state = h.session().state();
  if (begin < 0 || end < begin || end > state.position())
    throw StateError("[export] positions out of range");
  auto out = make_array<uint8_t>({state.rows_bytes(begin, end)});
  state.export_rows(begin, end, out.data());
  return out;
}

using Page = std::tuple<int64_t, int64_t, int, int64_t, uint64_t, std::optional<Bytes>>;
using Frontier = std::tuple<int, int64_t, size_t, uint64_t>;

struct History {
  std::vector<int32_t> tokens;
  std::vector<NumericClass> classes;
};

History history_of(const Tokens& tagged) {
  History out;
  out.tokens.reserve(tagged.size());
  out.classes.reserve(tagged.size());
  for (size_t i = 0; i < tagged.size(); ++i) {
    out.tokens.push_back(tagged.data()[i] & ~kMatrixTag);
    out.classes.push_back((tagged.data()[i] & kMatrixTag) != 0 ? NumericClass::matrix : NumericClass::canonical);
  }
  return out;
}

std::optional<std::tuple<int64_t, std::string>> read_pages(SessionHandle& h, const std::vector<Page>& pages,
                                                           const std::optional<Tokens>& tokens,
                                                           const std::optional<Frontier>& frontier) {
  const std::optional<BadSource> bad = h.call([&](Session& s, Poll*) {
    std::vector<PageSource> from;
    for (const auto& [begin, end, fd, offset, sum, data] : pages) {
      if (data && (begin < 0 || end < begin || data->size() != s.state().rows_bytes(begin, end)))
        throw StoreError("[restore] rows of positions " + std::to_string(begin) + " .. " + std::to_string(end) +
                         " have the wrong length");
      from.push_back({begin, end, fd, offset, sum, data ? data->data() : nullptr});
    }
    History history;
    if (tokens) history = history_of(*tokens);
    std::optional<Session::FrontierSource> window;
    if (frontier && tokens)
      window = {std::get<0>(*frontier), std::get<1>(*frontier), std::get<2>(*frontier), std::get<3>(*frontier)};
    return s.read_pages(from, history.tokens, history.classes, window);
  });
  if (!bad) return std::nullopt;
  return std::tuple(bad->number, bad->why);
}

}  // namespace

void bind_kv(nb::module_& m, nb::class_<SessionHandle>& session) {
  session
      .def("rows_bytes",
           [](SessionHandle& h, int64_t begin, int64_t end) {
             return with([=](Session& s) { return s.state().rows_bytes(begin, end); })(h);
           },
           nb::arg("begin"), nb::arg("end"), "Bytes that export_rows(begin, end) returns.")
      .def("export_rows", &export_rows, nb::arg("begin"), nb::arg("end"),
           "Compressed and index rows that tokens begin .. end - 1 complete: uint8 array.")
      .def("begin_restore",
           [](SessionHandle& h, int64_t keep) {
             h.call([=](Session& s, Poll*) { return s.begin_restore(keep), 0; });
           },
           nb::arg("keep"), "Keeps the rows of the first tokens and drops the rest; rows may follow.")
      .def("expect_rows",
           [](SessionHandle& h, int64_t end) { h.call([=](Session& s, Poll*) { return s.state().expect_rows(end), 0; }); },
           nb::arg("end"), "Rows of so many tokens are about to come.")
      .def("import_rows",
           [](SessionHandle& h, int64_t begin, int64_t end, const Bytes& data) {
             h.call([&](Session& s, Poll*) { return s.state().import_rows(begin, end, data.data(), data.size()), 0; });
           },
           nb::arg("begin"), nb::arg("end"), nb::arg("data"))
      .def("read_pages", &read_pages, nb::arg("pages"), nb::arg("tokens") = nb::none(), nb::arg("frontier") = nb::none(),
           "import_rows of pages (begin, end, fd, offset, sum, None) from open files whose rows have that XXH64, or (begin, "
           "end, -1, 0, 0, rows) from memory; with tokens also finish_restore, and read_frontier of (fd, offset, bytes, "
           "sum). Returns None, or the number of what is damaged (the frontier counts last) and why.")
      .def("finish_restore",
           [](SessionHandle& h, const Tokens& history) {
             const History all = history_of(history);
             h.call([&](Session& s, Poll*) {
               return s.finish_restore(all.tokens.data(), all.classes.data(), static_cast<int64_t>(all.tokens.size())), 0;
             });
           },
           nb::arg("history"), "All tokens of the restored state, as `history`; window rows are missing until complete().")
      .def("export_frontier",
           [](SessionHandle& h, bool encoder) {
             return array_of(h.call([=](Session& s, Poll*) { return s.export_frontier(encoder); }));
           },
           nb::arg("encoder") = false,
           "Window rows, open pair and last row at the position: uint8 array. encoder: those of the encoder layers only.")
      .def("import_frontier",
           [](SessionHandle& h, const Bytes& data) {
             h.call([&](Session& s, Poll*) { return s.import_frontier(data.data(), data.size()), 0; });
           },
           nb::arg("data"))
      .def_prop_ro("own_bytes", with([](Session& s) { return s.state().arena().usage().own; }),
                   "Bytes of cache segments that only this session uses.")
      .def_prop_ro("shared_bytes", with([](Session& s) { return s.state().arena().usage().shared; }),
                   "Bytes of cache segments that forks use as well.")
      .def_prop_ro("shares", with([](Session& s) { return s.state().arena().shares(); }),
                   "Do forks share memory (else they copy it)?")
      .def("rewind_start",
           [](SessionHandle& h, int64_t p, int64_t end) {
             return with([=](Session& s) { return s.rewind_start(p, end); })(h);
           },
           nb::arg("position"), nb::arg("end") = 0, "The first token that rewind(position, end) runs again.")
      .def("restore_start",
           [](SessionHandle& h, int64_t p, int64_t end, bool encoder) {
             const Restored from = encoder ? Restored::encoder : Restored::rows;
             return with([=](Session& s) { return s.restore_start(p, end, from); })(h);
           },
           nb::arg("position"), nb::arg("end") = 0, nb::arg("encoder") = false,
           "The first token that complete(end) runs again when rows, or an encoder frontier, were restored at position.");
  m.def(
      "cone",
      [](const nb::dict& shape, int64_t position, int64_t end, int64_t logits_from, int64_t window_from,
         int64_t entries_from, const std::vector<int64_t>& low, bool cut) {
        const Shape s = shape_from(shape);
        if (low.size() != static_cast<size_t>(s.n_layers)) throw OptionError("[cone] low: expected one number a layer");
        Cone cone = cone_of(s, {position, end, logits_from, window_from, entries_from}, low);
        if (cut) cut_at(s, position, low, &cone);
        return nb::make_tuple(cone.stream, cone.window);
      },
      nb::arg("shape"), nb::arg("position"), nb::arg("end"), nb::arg("logits_from"), nb::arg("window_from"),
      nb::arg("entries_from"), nb::arg("low"), nb::arg("cut") = false,
      "The rows to compute (csrc/engine/cone.h): first stream that enters each layer and the head, first window rows.");
  m.def(
      "xxh64",
      [](const Bytes& data, uint64_t seed) {
        nb::gil_scoped_release release;
        Xxh64 sum(seed);
        sum.add(data.data(), data.size());
        return sum.value();
      },
      nb::arg("data"), nb::arg("seed") = 0, "XXH64 of the bytes.");
}

}  // namespace ds4::py
