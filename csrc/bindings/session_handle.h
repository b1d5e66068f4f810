// Python's handle of a session: one call at a time, interruptible, never after close().
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "engine/session.h"

namespace ds4::py {

std::shared_ptr<const Model> model_of(nb::handle handle);
std::shared_ptr<const DrafterModel> drafter_of(nb::handle handle);

// Polled by the thread that runs: signals (Ctrl-C) and a cancel flag that any thread may set.
class PyPoll final : public Poll {
 public:
  PyPoll(std::atomic<bool>& cancel, nb::object tick) : cancel_(cancel), tick_(std::move(tick)) {}
  void progress(int done, int total) override {
    done_ = done;
    total_ = total;
  }
  bool stop() override {
    if (cancel_.load(std::memory_order_relaxed)) return true;
    const auto now = std::chrono::steady_clock::now();
    if (now - last_ < std::chrono::milliseconds(25)) return false;
    last_ = now;
    sleep_if_the_interpreter_ends();
    nb::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() == 0 && call_tick(now)) return false;
    raised_ = true;
    PyErr_Fetch(&type_, &value_, &traceback_);
    return true;
  }
  // With the GIL: raises what the signal handler or the callback raised.
  void rethrow() {
    if (!raised_) return;
    raised_ = false;
    PyErr_Restore(type_, value_, traceback_);
    throw nb::python_error();
  }

 private:
  // False: the callback raised, and the error is set.
  bool call_tick(std::chrono::steady_clock::time_point now) {
    if (tick_.is_none() || now - last_tick_ < std::chrono::milliseconds(100)) return true;
    last_tick_ = now;
    PyObject* result = PyObject_CallFunction(tick_.ptr(), "ii", done_, total_);
    Py_XDECREF(result);
    return result != nullptr;
  }

  std::atomic<bool>& cancel_;
  nb::object tick_;
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point last_tick_ = last_;
  int done_ = 0, total_ = 1;
  bool raised_ = false;
  PyObject *type_ = nullptr, *value_ = nullptr, *traceback_ = nullptr;
};

inline Logits parse_logits(const std::string& name) {
  if (name == "none") return Logits::none;
  if (name == "last") return Logits::last;
  if (name == "all") return Logits::all;
  throw OptionError("[session] logits: expected none, last or all, got '" + name + "'");
}

// Guards one engine session: one call at a time, never after close().
class SessionHandle {
 public:
  SessionHandle(nb::object model, int64_t context, int64_t retain, int64_t chunk, nb::object drafter, bool every_row)
      : model_(std::move(model)), drafter_(std::move(drafter)) {
    session_.reset(new Session(model_of(model_), context, retain, chunk, drafter_of(drafter_), every_row));
  }
  SessionHandle(nb::object model, nb::object drafter, std::unique_ptr<Session> session)
      : model_(std::move(model)), drafter_(std::move(drafter)), session_(session.release()) {}

  class Turn {
   public:
    explicit Turn(SessionHandle& h) : lock_(h.mutex_, std::try_to_lock) {
      if (!lock_.owns_lock())
        throw StateError("[session] busy in another thread; a session takes one call at a time (use fork() or another session)");
      if (!h.session_) throw StateError("[session] this session is closed");
    }

   private:
    std::unique_lock<std::mutex> lock_;
  };

  Session& session() { return *session_; }
  const Shape& shape() const { return model_of(model_)->shape; }

  std::optional<Out<float>> run(const Tokens& tokens, const std::string& logits, int64_t after, Trace* trace, nb::object tick,
                                bool matrix) {
    const Turn turn(*this);
    const Logits want = parse_logits(logits);
    const size_t rows = want == Logits::all ? tokens.size() : (want == Logits::last ? 1 : 0);
    auto out = make_array<float>({rows, static_cast<size_t>(session_->model().shape.vocab)});
    guarded(std::move(tick), [&](Poll* poll) {
      session_->run(tokens.data(), static_cast<int64_t>(tokens.size()), want, out.data(), poll, after, trace,
                    matrix ? NumericClass::matrix : NumericClass::canonical);
    });
    return rows == 0 ? std::nullopt : std::optional(std::move(out));
  }

  Drafter& drafter() {
    if (session_->drafter() == nullptr) throw StateError("[draft] this session has no drafter");
    return *session_->drafter();
  }

  // Calls f(session, poll) in a turn of its own, without the GIL.
  template <class F>
  auto call(F f) {
    const Turn turn(*this);
    decltype(f(*session_, static_cast<Poll*>(nullptr))) result{};
    guarded(nb::none(), [&](Poll* poll) { result = f(*session_, poll); });
    return result;
  }

  SessionHandle* fork() {
    const Turn turn(*this);
    return new SessionHandle(model_, drafter_, session_->fork());
  }

  std::optional<Out<float>> last_logits() {
    auto out = make_array<float>({static_cast<size_t>(session_->model().shape.vocab)});
    const bool known = call([&](Session& s, Poll* poll) { return s.last_logits(out.data(), poll); });
    return known ? std::optional(std::move(out)) : std::nullopt;
  }

  bool taking_back = false;  // stays true when taking back drafts failed (decode/decode.h)

  void close() {
    std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) throw StateError("[session] cannot close: busy in another thread; cancel() it first");
    session_.reset();
  }

  void cancel() { cancel_.store(true, std::memory_order_relaxed); }
  void clear_cancel() { cancel_.store(false, std::memory_order_relaxed); }
  bool closed() const { return session_ == nullptr; }

 private:
  template <class F>
  void guarded(nb::object tick, F f) {
    PyPoll poll(cancel_, std::move(tick));
    try {
      const GilRelease release;
      f(&poll);
    } catch (const Cancelled&) {
      poll.rethrow();
      throw;
    }
    poll.rethrow();
  }

  nb::object model_, drafter_;  // keep the weights mapped
  std::unique_ptr<Session, LeakInFork<Session>> session_;
  std::mutex mutex_;
  std::atomic<bool> cancel_{false};
};

template <class F>
auto with(F f) {
  return [f](SessionHandle& h) {
    const SessionHandle::Turn turn(h);
    return f(h.session());
  };
}

// Binds what only a drafter needs.
void bind_draft(nb::class_<SessionHandle>& session);

// Binds the part that moves state to and from bytes.
void bind_kv(nb::module_& m, nb::class_<SessionHandle>& session);

}  // namespace ds4::py
