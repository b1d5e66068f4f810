// fork(): a child has a copy of the memory but none of the threads.
#pragma once

#include <unistd.h>

namespace ds4 {

// Remembers the process it was made in.
class HomeProcess {
 public:
  // True in a child of fork(): threads of this object do not exist here, and its locks may be held for ever.
  bool forked() const { return ::getpid() != pid_; }

 private:
  pid_t pid_ = ::getpid();
};

// Deleter for objects with threads or locks. In a child of fork() they are not taken down: joining threads that do
// not exist, or destroying a condition that somebody waited for, may hang. Their memory goes with the process.
template <class T>
class LeakInFork {
 public:
  void operator()(T* p) const {
    if (!home_.forked()) delete p;
  }

 private:
  HomeProcess home_;
};

}  // namespace ds4
