// C++ exceptions become the classes of ds4v41.errors.
#include <cstring>

#include "base/error.h"
#include "bindings/bindings.h"

namespace ds4::py {

namespace {

void raise(const char* name, const char* message) {
  const nb::object module = nb::module_::import_("ds4v41.errors");
  PyErr_SetString(nb::object(module.attr(name)).ptr(), message);
}

void translate(const std::exception_ptr& p, void*) {
  try {
    std::rethrow_exception(p);
  }
#define DS4_TRANSLATE(name) \
  catch (const name& e) {   \
    raise(#name, e.what()); \
  }
  DS4_TRANSLATE(OptionError)
  DS4_TRANSLATE(ConfigError)
  DS4_TRANSLATE(CheckpointError)
  DS4_TRANSLATE(MemoryPlanError)
  DS4_TRANSLATE(TokenError)
  DS4_TRANSLATE(ContextError)
  DS4_TRANSLATE(StateError)
  DS4_TRANSLATE(NumericsError)
  DS4_TRANSLATE(EngramError)
  DS4_TRANSLATE(BackendError)
  DS4_TRANSLATE(StoreError)
  DS4_TRANSLATE(Cancelled)
#undef DS4_TRANSLATE
}

}  // namespace

void bind_errors(nb::module_&) { nb::register_exception_translator(translate, nullptr); }

}  // namespace ds4::py
