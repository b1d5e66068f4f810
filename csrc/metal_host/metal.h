// The door to the Metal back end: all that the engine and the bindings see of it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/backend.h"
#include "synth_units.h"

namespace ds4::metal {

// What the back end is called: the same host code and kernels run on Apple's and on NVIDIA's GPUs.
#ifdef DS4_CUDA
constexpr const char* kName = "cuda";
#else
constexpr const char* kName = "metal";
#endif

// Is there a Metal device (a real one, or the stand-in that runs kernels on this processor)?
bool available();
// Why not, in a sentence that says what to do; empty when available.
std::string why_not();

// Makes weights known to the device, without a copy: pages of mapped files are used in place. The weights must outlive
// what is returned, and back ends that use them must not outlive it. Throws BackendError for row types without a kernel.
std::shared_ptr<void> adopt(const Weights& weights, const std::vector<std::vector<float>>& vectors);
std::shared_ptr<void> adopt(const DrafterWeights& weights, const std::vector<std::vector<float>>& vectors);

// The shape must outlive the back end.
std::unique_ptr<Backend> make_backend(const Shape& shape, Activations activations);

// Most bytes that a back end keeps for its operations beside what it was asked to allocate: runs of n rows in a context of so many
// tokens; and a drafter's, for its block and for captured rows that are projected together.
int64_t working_bytes(const Shape& shape, int64_t n, int64_t context);
int64_t draft_working_bytes(const Shape& shape, const DrafterWeights& weights, int64_t block, int64_t captured);

// Memory of the device for weights that no file holds. The host may not look at what data() names; it is an address that
// weights may have. It must outlive what was adopted from it.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  virtual uint8_t* data() const = 0;
  virtual size_t bytes() const = 0;
  // Writes units first .. first + n - 1 at `offset` (metal/synth_units.h; csrc/convert/synth.h does the same on the host).
  virtual void fill(const SynthUnits& units, const uint32_t* table, int n_table, uint64_t first, uint64_t n, size_t offset) = 0;
  virtual void read(size_t offset, size_t n, uint8_t* out) const = 0;
};
// Throws MemoryPlanError when the device has not that much.
std::shared_ptr<DeviceMemory> make_memory(size_t bytes);

// What a device can do, below the level of a back end. Every measurement is `times` dispatches that wait for each other.
struct Took {
  double wall = 0.0, device = 0.0;  // seconds of all
};
class DeviceProbe {
 public:
  virtual ~DeviceProbe() = default;
  virtual Took copy(int64_t bytes, int times) = 0;  // within its memory: at most half of it
  virtual Took empty(int times) = 0;                // dispatches that do next to nothing
  // n activation rows times random matrices of a type, a different piece of the memory each time.
  virtual Took product(RowType type, int rows, int cols, int64_t row_bytes, int64_t scale_row_bytes, int n, int times) = 0;
};
std::unique_ptr<DeviceProbe> make_probe(int64_t bytes);

// What all back ends of this process issued so far; differences count a step (docs/metal.md).
struct Counters {
  int64_t dispatches = 0;
  int64_t levels = 0;           // groups of dispatches that may overlap: the length of the serial path
  int64_t command_buffers = 0;
  int64_t waits = 0;
  int64_t latches = 0;          // for which the device waits itself
};
Counters counters();
// The same by kernel: its dispatches, and how many of them opened a level.
struct KernelCounts {
  int64_t dispatches = 0, levels = 0;
};
std::vector<std::pair<std::string, KernelCounts>> counters_by_kernel();

}  // namespace ds4::metal
