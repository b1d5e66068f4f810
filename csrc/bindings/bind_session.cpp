#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>

#include "bindings/session_handle.h"

namespace ds4::py {

namespace {

class PyTrace final : public Trace {
 public:
  PyTrace(const Shape& shape, nb::dict out, nb::dict streams, nb::dict mixes, nb::dict after)
      : shape_(shape),
        out_(std::move(out)), streams_(std::move(streams)), mixes_(std::move(mixes)), after_(std::move(after)) {}
  bool wants(const char*) override { return true; }
  void tap(int layer, const char* name, const float* data, std::initializer_list<int64_t> shape) override {
    put(layer, name, data, shape);
  }
  void tap(int layer, const char* name, const int32_t* data, std::initializer_list<int64_t> shape) override {
    put(layer, name, data, shape);
  }
  void enter(int layer, float* stream, float* mix, int64_t n) override {
    nb::gil_scoped_acquire gil;
    replace("streams", streams_, layer, stream, n * shape_.n_streams * shape_.hidden);
    replace("mixes", mixes_, layer, mix, n * shape_.n_streams);
  }
  void after_engram(int layer, float* stream, int64_t n) override {
    nb::gil_scoped_acquire gil;
    replace("after_engram", after_, layer, stream, n * shape_.n_streams * shape_.hidden);
  }

 private:
  template <class T>
  void put(int layer, const char* name, const T* data, std::initializer_list<int64_t> shape) {
    nb::gil_scoped_acquire gil;
    size_t n = 1, dims[4];
    size_t k = 0;
    for (int64_t d : shape) {
      dims[k++] = static_cast<size_t>(d);
      n *= static_cast<size_t>(d);
    }
    T* copy = new T[n];
    std::memcpy(copy, data, n * sizeof(T));
    nb::capsule owner(copy, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    const std::string key = layer < 0 ? name : "L" + std::to_string(layer) + "." + name;
    out_[key.c_str()] = Out<T>(copy, k, dims, owner);
  }
  static void replace(const char* what, const nb::dict& from, int layer, float* into, int64_t n) {
    const nb::int_ key(layer);
    if (!from.contains(key)) return;
    nb::ndarray<const float, nb::c_contig, nb::device::cpu> a;
    if (!nb::try_cast(from[key], a) || static_cast<int64_t>(a.size()) != n)
      throw OptionError(std::string("[trace] ") + what + " of layer " + std::to_string(layer) + ": expected " +
                        std::to_string(n) + " contiguous float32 values");
    std::memcpy(into, a.data(), a.size() * sizeof(float));
  }
  const Shape& shape_;
  nb::dict out_, streams_, mixes_, after_;
};

nb::object ledger_of(const Ledger* ledger) {
  if (ledger == nullptr) return nb::none();
  nb::list rows;
  for (const LedgerRow& r : ledger->rows())
    rows.append(nb::make_tuple(op_name(r.op), r.layer, r.dispatches, r.bytes, r.seconds, r.kernels, r.device_seconds));
  nb::dict out;
  out["rows"] = rows;
  out["runs"] = ledger->runs();
  out["tokens"] = ledger->tokens();
  out["matrix_tokens"] = ledger->matrix_tokens();
  out["seconds"] = ledger->seconds();
  out["experts_touched"] = ledger->experts_touched();
  out["on_device"] = ledger->on_device();
  out["missing"] = ledger->missing();
  return out;
}

template <class... A, class M>
auto with2(M member) {
  return [member](SessionHandle& h, A... a) {
    const SessionHandle::Turn turn(h);
    return (h.session().*member)(a...);
  };
}

}  // namespace

void bind_session(nb::module_& m) {
  nb::class_<Mark>(m, "Mark", "A position that a session can come back to.")
      .def_ro("position", &Mark::position)
      .def_ro("valid", &Mark::valid);
  nb::class_<SessionHandle> session(m, "Session", "State and runs of one session.");
  session.def(nb::init<nb::object, int64_t, int64_t, int64_t, nb::object, bool>(), nb::arg("model"), nb::arg("context"),
           nb::arg("retain"), nb::arg("chunk"), nb::arg("drafter").none() = nb::none(), nb::arg("every_row") = false)
      .def(
          "run",
          [](SessionHandle& h, const Tokens& tokens, const std::string& logits, nb::object tick, int64_t after, bool matrix) {
            return h.run(tokens, logits, after, nullptr, std::move(tick), matrix);
          },
          nb::arg("tokens"), nb::arg("logits") = "last", nb::arg("tick") = nb::none(), nb::arg("after") = 0,
          nb::arg("matrix") = false,
          "Appends tokens; returns float32 [rows, vocab] for the wanted rows, or None. tick(done, total) is called now "
          "and then with how much of the work is done; an exception from it stops the run. after: with logits \"none\", "
          "so many tokens of the same prefill follow, and rows that nobody will need are left out. matrix: in that numeric class.")
      .def(
          "trace_run",
          [](SessionHandle& h, const Tokens& tokens, const std::string& logits, nb::dict streams, nb::dict mixes, nb::dict after) {
            nb::dict out;
            PyTrace trace(h.shape(), out, streams, mixes, after);
            out["logits"] = h.run(tokens, logits, 0, &trace, nb::none(), false);
            return out;
          },
          nb::arg("tokens"), nb::arg("logits") = "all", nb::arg("streams") = nb::dict(), nb::arg("mixes") = nb::dict(),
          nb::arg("after_engram") = nb::dict(), "A run that also returns every intermediate; layer inputs may be given.")
      .def("expect", [](SessionHandle& h, const Tokens& tokens) {
             const SessionHandle::Turn turn(h);
             h.session().expect(tokens.data(), static_cast<int64_t>(tokens.size()));
           }, nb::arg("tokens"),
           "What the run after the next one will probably append: its Engram rows are read early. Only a hint.")
      .def("engram_counters", with([](Session& s) {
             const FeedCounters& c = s.engram_counters();
             nb::dict d;
             d["wait_seconds"] = c.wait_seconds;
             d["runs"] = c.runs;
             d["expected"] = c.expected;
             d["joined"] = c.joined;
             return d;
           }),
           "wait_seconds that layers waited for rows; runs; requests that an expectation had begun early, or the device joined.")
      .def("mark", [](SessionHandle& h) { return h.call([](Session& s, Poll* poll) { return s.mark(poll); }); })
      .def("truncate",
           [](SessionHandle& h, int64_t to) { return h.call([to](Session& s, Poll* p) { return s.truncate(to, p); }); },
           nb::arg("position"), "Goes back where the window rows are kept; returns how many tokens ran again (0 or 1).")
      .def("rewind",
           [](SessionHandle& h, int64_t to, int64_t end) {
             return h.call([=](Session& s, Poll* p) { return s.rewind(to, end, p); });
           },
           nb::arg("position"), nb::arg("end") = 0,
           "Goes back to any position; returns how many tokens ran again. end: what is prefilled next ends there, so only "
           "what that needs is run; 0: everything.")
      .def("complete",
           [](SessionHandle& h, int64_t end) { return h.call([=](Session& s, Poll* p) { return s.complete(end, p); }); },
           nb::arg("end") = 0, "Computes missing window rows; returns how many tokens ran. end: as for rewind.")
      .def("fork", &SessionHandle::fork, nb::rv_policy::take_ownership)
      .def("last_logits", &SessionHandle::last_logits, "Logits after the last token, or None when they are not known.")
      .def("truncate_to_mark",
           [](SessionHandle& h, const std::shared_ptr<Mark>& mark) {
             const SessionHandle::Turn turn(h);
             h.session().truncate(*mark);
           })
      .def("cancel", &SessionHandle::cancel, "From any thread: stops the run in progress (and the next one).")
      .def("clear_cancel", &SessionHandle::clear_cancel)
      .def("close", &SessionHandle::close)
      .def_prop_ro("closed", &SessionHandle::closed)
      .def_prop_ro("position", with([](Session& s) { return s.state().position(); }))
      .def_prop_ro("ready", with([](Session& s) { return s.state().ready(); }),
                   "Are all window rows there that the next step reads? Not after a long prefill that stopped early.")
      .def_prop_ro("lowest", with([](Session& s) { return s.state().lowest(); }))
      .def_prop_ro("context", with([](Session& s) { return s.state().context(); }))
      .def_prop_ro("chunk", with([](Session& s) { return s.chunk(); }))
      .def_prop_ro("tokens", with([](Session& s) {
                     const auto& tokens = s.state().tokens();
                     auto out = make_array<int32_t>({tokens.size()});
                     std::copy(tokens.begin(), tokens.end(), out.data());
                     return out;
                   }),
                   nb::rv_policy::move, "int32 [position]")
      .def_prop_ro("history", with([](Session& s) {
                     const auto& tokens = s.state().tokens();
                     const auto& classes = s.state().classes();
                     auto out = make_array<int32_t>({tokens.size()});
                     for (size_t i = 0; i < tokens.size(); ++i)
                       out.data()[i] = tokens[i] | (classes[i] == NumericClass::matrix ? kMatrixTag : 0);
                     return out;
                   }),
                   nb::rv_policy::move, "tokens, plus 2^30 where a token was computed in the matrix class: int32 [position]")
      .def_prop_ro("reserved_bytes", with([](Session& s) { return s.state().reserved_bytes(); }))
      .def_prop_ro("scratch_bytes", with([](Session& s) { return s.scratch_bytes(); }))
      .def_prop_ro("working_bytes", with([](Session& s) { return s.working_bytes(); }))
      .def_prop_ro("draft_working_bytes", with([](Session& s) { return s.drafter() != nullptr ? s.drafter()->working_bytes() : 0; }),
                   "What the operations of the drafter's back end keep.")
      .def("start_ledger", with([](Session& s) { s.start_ledger(); }), "Counts and times every operation from now on.")
      .def("ledger", with([](Session& s) { return ledger_of(s.ledger()); }),
           "What start_ledger() saw: rows (op, layer, dispatches, bytes, seconds, dispatches and seconds of the device), runs, tokens, seconds, missing; or None.")
      .def("draft_ledger", with([](Session& s) { return ledger_of(s.drafter() != nullptr ? s.drafter()->ledger() : nullptr); }),
           "The same of the drafter: its runs are draft blocks.")
      .def("fill_for_benchmark", with2<int64_t, uint64_t>(&Session::fill_for_benchmark), nb::arg("position"), nb::arg("seed"),
           "Benchmarks only: random caches and tokens up to an even position, in an empty session.")
      .def_prop_ro("ready", with([](Session& s) { return s.state().ready(); }))
      .def("encoder_kept", [](SessionHandle& h, int64_t p) {
             return with([p](Session& s) { return s.state().ready_at(p, encoder_layers(s.model().shape)); })(h);
           }, nb::arg("position"), "Are the encoder's window rows at this earlier position kept?")
      .def_prop_ro("decoder_cone", with([](Session& s) { return s.decoder_cone(); }),
                   "Tokens that are run again where only the window rows of the decoder are missing, at most.")
      .def("reaches", [](SessionHandle& h, int64_t p) { return with([p](Session& s) { return s.state().reaches(p); })(h); },
           nb::arg("position"), "Would truncate(position) work?")
      .def("live_bytes", with([](Session& s) {
             const auto b = s.state().live_bytes();
             return nb::bytes(reinterpret_cast<const char*>(b.data()), b.size());
           }),
           "The live state: equal bytes mean equal futures.");
  bind_draft(session);
  bind_kv(m, session);
}

}  // namespace ds4::py
