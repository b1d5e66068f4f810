// The text of every metal/<family>.metal with its includes in place, embedded by the build (metal/generate.py).
#pragma once

namespace ds4::metal {

struct Source {
  const char* family;
  const char* text;
};
extern const Source kSources[];
extern const int kSourceCount;

}  // namespace ds4::metal
