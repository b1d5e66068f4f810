// The GIL around long work, and the end of the interpreter.
//
// A daemon thread that comes back for the GIL while the interpreter ends is killed by Python (before 3.14) with
// pthread_exit, whose unwinding cannot pass a destructor and would abort the whole process. Such a thread sleeps here
// instead, until the process is gone, as Python 3.14 does it.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

namespace ds4::py {

inline void sleep_if_the_interpreter_ends() {
#if PY_VERSION_HEX >= 0x030d0000
  while (Py_IsFinalizing()) ::pause();
#else
  while (_Py_IsFinalizing()) ::pause();
#endif
}

// As nanobind::gil_scoped_release.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  ~GilRelease() {
    sleep_if_the_interpreter_ends();
    PyEval_RestoreThread(state_);
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace ds4::py
