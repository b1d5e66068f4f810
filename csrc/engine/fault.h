// Failures on demand: tests make one happen at a certain place and look at what it leaves behind.
#pragma once

#include <array>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>

#include "base/error.h"

namespace ds4 {

enum class FaultPoint : uint8_t {
  draft_begin, draft_capture, draft_commit, draft_settle, draft_start, draft_row, draft_nan,  // the drafter's part
  run_start, run_layer, run_head, run_commit,                                                 // a run of the target
  rollback_before, rollback_after,                                                            // around a truncation
  draw,                                                                                       // of a token, in the decode loop
  count
};
constexpr std::array<std::string_view, static_cast<size_t>(FaultPoint::count)> kFaultNames = {
    "draft_begin", "draft_capture", "draft_commit", "draft_settle", "draft_start",     "draft_row",     "draft_nan",
    "run_start",   "run_layer",     "run_head",     "run_commit",   "rollback_before", "rollback_after", "draw"};

// One fault that is armed, or none. Costs a comparison where it is asked.
class Faults {
 public:
  // The point fails once, after it was passed `after` times. kind: "runtime", "memory" or "numerics".
  void arm(std::string_view point, int64_t after, std::string_view kind) {
    if (kind != "runtime" && kind != "memory" && kind != "numerics")
      throw OptionError("[fault] expected the kind runtime, memory or numerics, got '" + std::string(kind) + "'");
    for (size_t i = 0; i < kFaultNames.size(); ++i) {
      if (kFaultNames[i] != point) continue;
      armed_ = static_cast<int>(i);
      left_ = after;
      kind_ = kind[0];
      return;
    }
    throw OptionError("[fault] there is no point '" + std::string(point) + "'");
  }
  bool hit(FaultPoint point) {
    if (armed_ != static_cast<int>(point) || left_-- > 0) return false;
    armed_ = -1;
    return true;
  }
  void at(FaultPoint point) {
    if (!hit(point)) return;
    if (kind_ == 'm') throw std::bad_alloc();
    const std::string what = "injected at " + std::string(kFaultNames[static_cast<size_t>(point)]);
    if (kind_ == 'n') throw NumericsError(what);
    throw std::runtime_error(what);
  }

 private:
  int armed_ = -1;
  int64_t left_ = 0;
  char kind_ = 'r';
};

}  // namespace ds4
