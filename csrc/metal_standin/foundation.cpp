#include <Foundation/Foundation.hpp>

namespace NS {

namespace {
thread_local AutoreleasePool* t_pool = nullptr;
}

void Object::leave_to_pool() {
  if (t_pool != nullptr) t_pool->objects_.push_back(this);
}

AutoreleasePool* AutoreleasePool::init() {
  outer_ = t_pool;
  t_pool = this;
  return this;
}

AutoreleasePool::~AutoreleasePool() {
  t_pool = outer_;
  for (Object* object : objects_) object->drop_reference();
}

String* String::string(const char* text, StringEncoding encoding) { return alloc()->init(text, encoding)->autorelease(); }

Array::~Array() {
  for (Object* object : objects_) release_any(object);
}

}  // namespace NS
