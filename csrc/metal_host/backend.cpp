#include "metal_host/backend.h"

#include <algorithm>

#include "base/error.h"

namespace ds4::metal {

namespace {

// What the kernels are built for; a checkpoint of other sizes is refused when it is opened.
void check_shape(const Shape& s) {
  const auto refuse = [](const std::string& what) {
    throw BackendError("[metal] this back end needs " + what + "; open the model with backend=\"cpu\"");
  };
  if (s.n_streams > 5) refuse("at most 5 residual streams, the model has " + std::to_string(s.n_streams));
  if (s.hidden > 7168) refuse("a hidden size of at most 7168, the model has " + std::to_string(s.hidden));
  if (s.q_rank > 7168 || s.head_dim > 1024) refuse("a query rank of at most 7168 and heads of at most 1024");
  if (s.index_dim > 480) refuse("index heads of at most 480, the model has " + std::to_string(s.index_dim));
  if (s.top_k > 8) refuse("at most 8 routed experts a token, the model has " + std::to_string(s.top_k));
}

}  // namespace

MetalBackend::MetalBackend(const Shape& shape, Activations activations, std::shared_ptr<Stream> stream)
    : s_(shape),
      round_(activations != Activations::fp32),
      quant_(activations == Activations::fp8),
      activations_(activations),
      device_(Device::get()),
      stream_(std::move(stream)),
      temps_(static_cast<size_t>(Temp::count)) {
  check_shape(shape);
}

MetalBackend::~MetalBackend() {
  try {
    wait();  // a sibling's work goes on
  } catch (...) {  // it tells when it waits itself
  }
  for (const Block& b : temps_)
    if (b.buffer) device_.forget(b.buffer->contents());
}

void* MetalBackend::alloc(size_t bytes) { return device_.alloc(bytes, false); }
void* MetalBackend::alloc_for_host(size_t bytes) { return device_.alloc(bytes, true); }
void MetalBackend::free(void* p, size_t) { device_.free(p); }

Backend* MetalBackend::sibling(const Shape& shape) const {
  return new MetalBackend(shape, activations_, stream_);
}

void MetalBackend::set_class(NumericClass c) {
  if (c != NumericClass::canonical)
    throw OptionError(std::string("[") + kName + "] this back end has the canonical class only; open the model with prefill=\"exact\"");
}

void MetalBackend::finish_later(const float* y, int n, Finish finish) {
  before_dispatch();
  finish_ = std::move(finish);
  finish_y_ = y;
  finish_n_ = n;
}

void MetalBackend::finish_now(const HcWriteArgs* write) {
  const Finish finish = std::move(finish_);
  finish_ = nullptr;
  finish(write);
}

void MetalBackend::encode_now(const char* kernel, Constants constants, const void* args, size_t args_bytes,
                              std::initializer_list<Argument> buffers, Grid grid, int threads, size_t threadgroup_bytes) {
  constants.round = round_ ? 1 : 0;
  constants.quant = quant_ ? 1 : 0;
  if (grid.x > 0 && grid.y > 0 && grid.z > 0) ++issued_;
  stream_->dispatch(device_.kernel(kernel, constants), args, args_bytes, buffers, grid, threads, threadgroup_bytes);
}

void MetalBackend::submit() {
  before_dispatch();
  stream_->submit();
}

Latch* MetalBackend::latch() {
  before_dispatch();
  return stream_->latch();
}

void MetalBackend::wait() {
  before_dispatch();
  stream_->wait();
  free_retired();
  held_.clear();
}

void MetalBackend::free_retired() {
  for (const Block& b : retired_) {
    device_.forget(b.buffer->contents());
    work_ -= b.buffer->length();
  }
  retired_.clear();
}

void MetalBackend::abandon() noexcept {
  finish_ = nullptr;
  stream_->abandon();
}

void MetalBackend::breathe(int n) {
  if (n <= 2 * kTileRows) return;  // a step or a verification: encoded in one go
  if (stream_->hold(1, poll_)) throw Cancelled("[cancel] stopped before the step was complete; the session is unchanged");
}

void* MetalBackend::temp_bytes(Temp which, size_t bytes) {
  Block& b = temps_[static_cast<size_t>(which)];
  if (bytes > b.bytes) {
    if (b.buffer) retired_.push_back(std::move(b));
    b.buffer = device_.new_buffer(bytes);
    b.bytes = bytes;
    work_ += b.buffer->length();
    most_work_ = std::max(most_work_, work_);
    device_.remember(b.buffer->contents(), bytes, b.buffer.get(), 0);
  }
  return b.buffer->contents();
}

void MetalBackend::begin_run(int n) {
  constexpr int kFew = 64;  // rows that are not worth letting go of
  if (n <= run_rows_ && (n >= run_rows_ / 8 || run_rows_ <= kFew)) return;
  run_rows_ = n;
  for (Block& b : temps_) {
    if (!b.buffer) continue;
    retired_.push_back(std::move(b));
    b = {};
  }
  if (stream_->idle()) free_retired();  // else when what uses them is done
  most_work_ = work_;
}

std::unique_ptr<Backend> make_backend(const Shape& shape, Activations activations) {
  return std::make_unique<MetalBackend>(shape, activations, std::make_shared<Stream>());
}

}  // namespace ds4::metal
