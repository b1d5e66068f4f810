// The names of Foundation that our host code uses, as metal-cpp spells them, without Apple's libraries.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace NS {

using UInteger = std::uintptr_t;
using Integer = std::intptr_t;
using TimeInterval = double;
using StringEncoding = UInteger;
constexpr StringEncoding ASCIIStringEncoding = 1;
constexpr StringEncoding UTF8StringEncoding = 4;

struct Range {
  Range(UInteger loc, UInteger len) : location(loc), length(len) {}
  static Range Make(UInteger loc, UInteger len) { return Range(loc, len); }
  UInteger location, length;
};

class Object {
 public:
  Object() = default;
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;
  UInteger retainCount() const { return static_cast<UInteger>(references_.load()); }

 protected:
  virtual ~Object() = default;
  void add_reference() { references_.fetch_add(1, std::memory_order_relaxed); }
  void drop_reference() {
    if (references_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }
  static void release_any(Object* object) { object->drop_reference(); }
  void leave_to_pool();  // released when the innermost AutoreleasePool of this thread ends; kept for ever without one

 private:
  friend class AutoreleasePool;
  std::atomic<long> references_{1};
};

template <class Class, class Base = Object>
class Referencing : public Base {
 public:
  Class* retain() {
    this->add_reference();
    return static_cast<Class*>(this);
  }
  void release() { this->drop_reference(); }
  Class* autorelease() {
    this->leave_to_pool();
    return static_cast<Class*>(this);
  }
};

class AutoreleasePool : public Referencing<AutoreleasePool> {
 public:
  static AutoreleasePool* alloc() { return new AutoreleasePool; }
  AutoreleasePool* init();
  void drain() { release(); }

 protected:
  ~AutoreleasePool() override;

 private:
  friend class Object;
  std::vector<Object*> objects_;
  AutoreleasePool* outer_ = nullptr;
};

class String : public Referencing<String> {
 public:
  static String* string(const char* text, StringEncoding encoding);
  static String* alloc() { return new String; }
  String* init() { return this; }
  String* init(const char* text, StringEncoding) {
    text_ = text;
    return this;
  }
  const char* utf8String() const { return text_.c_str(); }
  const char* cString(StringEncoding) const { return text_.c_str(); }
  UInteger length() const { return text_.size(); }
  bool isEqualToString(const String* other) const { return text_ == other->text_; }

 private:
  std::string text_;
};

class Error : public Referencing<Error> {
 public:
  explicit Error(std::string text) : description_(String::alloc()->init(text.c_str(), UTF8StringEncoding)) {}
  String* localizedDescription() const { return description_; }
  Integer code() const { return 1; }

 protected:
  ~Error() override { description_->release(); }

 private:
  String* description_;
};

class Array : public Referencing<Array> {
 public:
  explicit Array(std::vector<Object*> objects) : objects_(std::move(objects)) {}  // takes one reference to each
  UInteger count() const { return objects_.size(); }
  template <class T = Object>
  T* object(UInteger i) const {
    return static_cast<T*>(objects_.at(i));
  }

 protected:
  ~Array() override;

 private:
  std::vector<Object*> objects_;
};

// Owns one reference.
template <class T>
class SharedPtr {
 public:
  SharedPtr() = default;
  SharedPtr(std::nullptr_t) {}
  SharedPtr(const SharedPtr& other) : object_(other.object_) {
    if (object_ != nullptr) object_->retain();
  }
  SharedPtr(SharedPtr&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  ~SharedPtr() { reset(); }
  SharedPtr& operator=(SharedPtr other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  T* get() const { return object_; }
  T* operator->() const { return object_; }
  T& operator*() const { return *object_; }
  explicit operator bool() const { return object_ != nullptr; }
  T* detach() { return std::exchange(object_, nullptr); }
  void reset() {
    if (object_ != nullptr) std::exchange(object_, nullptr)->release();
  }

 private:
  template <class U>
  friend SharedPtr<U> TransferPtr(U* object);
  template <class U>
  friend SharedPtr<U> RetainPtr(U* object);
  T* object_ = nullptr;
};

template <class T>
SharedPtr<T> TransferPtr(T* object) {
  SharedPtr<T> p;
  p.object_ = object;
  return p;
}
template <class T>
SharedPtr<T> RetainPtr(T* object) {
  return TransferPtr(object != nullptr ? object->retain() : nullptr);
}

}  // namespace NS
