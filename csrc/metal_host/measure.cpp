// measure: memory of the device filled by the device, and what it can do below the level of a back end.
#include "measure.h"

#include <chrono>
#include <cstring>

#include "base/error.h"
#include "metal_host/backend.h"
#include "metal_host/products.h"

namespace ds4::metal {

namespace {

using Clock = std::chrono::steady_clock;

// Memory that both see, for as long as this lives.
class Shared {
 public:
  explicit Shared(size_t bytes) : p_(Device::get().alloc(bytes)) {}
  ~Shared() { Device::get().free(p_); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  template <class T>
  T* as() const { return static_cast<T*>(p_); }

 private:
  void* p_;
};

void copy_words(Stream& stream, const Argument& from, const Argument& to, int64_t words) {
  const CopyParams params{static_cast<uint64_t>(words)};
  stream.dispatch(Device::get().kernel("copy_words", {}), &params, sizeof params, {from, to},
                  Grid{std::max<int64_t>(1, groups_of(words, COPY_THREADS * COPY_EACH))}, COPY_THREADS, 0);
}

class Memory final : public DeviceMemory {
 public:
  explicit Memory(size_t bytes) : bytes_(bytes), buffer_(Device::get().new_weights(bytes)) {
    Device::get().remember(data(), bytes_, buffer_.get(), 0);
  }
  ~Memory() override { Device::get().forget(data()); }

  uint8_t* data() const override { return static_cast<uint8_t*>(buffer_->contents()); }
  size_t bytes() const override { return bytes_; }

  void fill(const SynthUnits& units, const uint32_t* table, int n_table, uint64_t first, uint64_t n, size_t offset) override {
    constexpr uint64_t kMost = uint64_t{1} << 30;  // units of a dispatch
    if (offset > bytes_ || n > (bytes_ - offset) / units.unit_bytes)
      throw OptionError("[synth] the units do not fit into the " + std::to_string(bytes_) + " bytes of this memory");
    const Shared words(static_cast<size_t>(n_table) * sizeof(uint32_t));
    std::memcpy(words.as<uint32_t>(), table, static_cast<size_t>(n_table) * sizeof(uint32_t));
    Stream stream;
    for (uint64_t done = 0; done < n; done += kMost) {
      const SynthParams params{first + done, std::min(kMost, n - done), units, 0};
      Place to;
      Device::get().find(data() + offset + done * units.unit_bytes, &to);
      stream.dispatch(Device::get().kernel("synth_fill", {}), &params, sizeof params,
                      {fixed(to), reads(words.as<uint32_t>(), n_table)}, Grid{groups_of(static_cast<int64_t>(params.n), SYNTH_THREADS)},
                      SYNTH_THREADS, 0);
    }
    stream.wait();
  }

  void read(size_t offset, size_t n, uint8_t* out) const override {
    if (offset > bytes_ || n > bytes_ - offset)
      throw OptionError("[synth] the range is outside of the " + std::to_string(bytes_) + " bytes of this memory");
    if (n == 0) return;
    const size_t begin = offset / 16 * 16, words = (offset + n - begin + 15) / 16;  // buffers end at whole pages
    const Shared back(16 * words);
    Stream stream;
    copy_words(stream, fixed(data() + begin), writes(back.as<uint8_t>(), static_cast<int64_t>(16 * words)), static_cast<int64_t>(words));
    stream.wait();
    std::memcpy(out, back.as<uint8_t>() + (offset - begin), n);
  }

 private:
  size_t bytes_;
  Ref<MTL::Buffer> buffer_;
};

// Bytes that decode to numbers in every format: no half float and no scale among them is infinite.
void fill_random(DeviceMemory& memory) {
  std::vector<uint32_t> table(SYNTH_HEADS + 256);
  for (uint32_t i = 0; i < 256; ++i) table[SYNTH_HEADS + i] = i & (i % 2 != 0 ? 0x3fu : 0x37u);
  memory.fill({SYNTH_BLOCK, 64, 0, 64, 1}, table.data(), static_cast<int>(table.size()), 0, memory.bytes() / 64, 0);
}

class Probe final : public DeviceProbe {
 public:
  explicit Probe(int64_t bytes)
      : memory_(make_memory(static_cast<size_t>(bytes))), stream_(std::make_shared<Stream>()), backend_(shape_, Activations::bf16, stream_) {
    if (bytes < 1 << 16) throw OptionError("[bench] expected at least 64 KiB of memory of the device");
    fill_random(*memory_);
  }

  Took copy(int64_t bytes, int times) override {
    const auto half = static_cast<int64_t>(memory_->bytes() / 2 / 16 * 16);
    if (bytes < 16 || bytes > half) throw OptionError("[bench] copies have 16 to " + std::to_string(half) + " bytes here");
    const int64_t words = bytes / 16;
    return timed([&](int) { copy_words(*stream_, fixed(memory_->data()), writes(memory_->data() + half, 16 * words), words); }, times);
  }

  Took empty(int times) override {
    return timed([&](int) { copy_words(*stream_, fixed(memory_->data()), updates(memory_->data(), 16), 0); }, times);
  }

  Took product(RowType type, int rows, int cols, int64_t row_bytes, int64_t scale_row_bytes, int n, int times) override {
    const int64_t n_bytes = (row_bytes * rows + 15) / 16 * 16, pieces = static_cast<int64_t>(memory_->bytes()) / n_bytes;
    if (pieces < 1) throw OptionError("[bench] the matrix has " + std::to_string(n_bytes) + " bytes, more than the memory of this probe");
    const Shared x(static_cast<size_t>(n) * cols * sizeof(float)), out(static_cast<size_t>(n) * rows * sizeof(float));
    for (int64_t i = 0; i < static_cast<int64_t>(n) * cols; ++i) x.as<float>()[i] = static_cast<float>(i * 37 % 255 - 127) / 64.f;
    const Shared scale(static_cast<size_t>(scale_row_bytes > 0 ? scale_row_bytes * rows : 1));
    std::memset(scale.as<uint8_t>(), 120, static_cast<size_t>(scale_row_bytes > 0 ? scale_row_bytes * rows : 1));
    Matrix m;
    m.type = type, m.rows = rows, m.cols = cols, m.row_bytes = row_bytes, m.scale_row_bytes = scale_row_bytes;
    m.scale = scale_row_bytes > 0 ? scale.as<uint8_t>() : nullptr;
    return timed([&](int i) {
      m.data = memory_->data() + i % pieces * n_bytes;
      backend_.product(m, x.as<float>(), n, out.as<float>());
    }, times);
  }

 private:
  template <class F>
  Took timed(F f, int times) {
    f(0);  // a kernel that is not compiled yet
    backend_.wait();
    const double before = stream_->device_seconds();
    const auto start = Clock::now();
    for (int i = 0; i < times; ++i) f(i + 1);
    backend_.wait();
    return {std::chrono::duration<double>(Clock::now() - start).count(), stream_->device_seconds() - before};
  }

  const Shape shape_{};
  std::shared_ptr<DeviceMemory> memory_;
  std::shared_ptr<Stream> stream_;
  MetalBackend backend_;
};

}  // namespace

std::shared_ptr<DeviceMemory> make_memory(size_t bytes) { return std::make_shared<Memory>(bytes); }
std::unique_ptr<DeviceProbe> make_probe(int64_t bytes) { return std::make_unique<Probe>(bytes); }

}  // namespace ds4::metal
