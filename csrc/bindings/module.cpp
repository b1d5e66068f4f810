#include "bindings/bindings.h"

NB_MODULE(_ext, m) {
  m.doc() = "The compiled part of ds4v41. Use the classes of the ds4v41 package; this module may change at any time.";
  nanobind::set_leak_warnings(false);  // a model that lives until the interpreter ends is the user's choice, no fault
  ds4::py::bind_errors(m);
  ds4::py::bind_engram(m);
  ds4::py::bind_model(m);
  ds4::py::bind_session(m);
  ds4::py::bind_ops(m);
  ds4::py::bind_select(m);
  ds4::py::bind_bench(m);
  ds4::py::bind_synth(m);
#if DS4_STANDIN
  ds4::py::bind_standin(m);
#endif
  ds4::bind_convert(m);
  ds4::bind_sampling(m);
}
