// The exceptions of the C++ side. bindings/ turns each into the class of the same name in errors.py.
#pragma once

#include <stdexcept>
#include <string>

namespace ds4 {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

#define DS4_ERROR(name)        \
  struct name : Error {        \
    using Error::Error;        \
  }

DS4_ERROR(OptionError);
DS4_ERROR(ConfigError);
DS4_ERROR(CheckpointError);
DS4_ERROR(MemoryPlanError);
DS4_ERROR(TokenError);
DS4_ERROR(ContextError);
DS4_ERROR(StateError);
DS4_ERROR(NumericsError);
DS4_ERROR(EngramError);
DS4_ERROR(BackendError);
DS4_ERROR(StoreError);
DS4_ERROR(Cancelled);

#undef DS4_ERROR

}  // namespace ds4
