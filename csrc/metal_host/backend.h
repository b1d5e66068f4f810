// The Metal back end: every operation of the contract as a few dispatches. Its families are in the files of the same names.
//
// Operations are only issued here; they run when the stream is submitted, and are done after wait(). Argument structs and
// kernels of a family: metal/<family>.h and metal/<family>.metal. docs/metal.md tells how to write one.
#pragma once

#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "metal_host/stream.h"
#include "metal_host/weights.h"

struct AttendParams;

namespace ds4::metal {

constexpr int kLanes = 32;      // of a simdgroup
constexpr int kTileRows = 8;    // activation rows that share one stream of weights

// Memory of the back end between two dispatches of an operation: one block for each name, grown when needed.
enum class Temp : int {
  hc_partials, hc_mixes, window_rows, compress_raw, compress_latent, compress_key, index_query, select_scores, select_keys,
  attend_partials, engram_rows, engram_projected, draft_main, markov_joined, markov_bias, markov_sums, moe_groups,
  moe_parts, count
};

struct AttendBuffers;

class MetalBackend final : public Backend {
 public:
  MetalBackend(const Shape& shape, Activations activations, std::shared_ptr<Stream> stream);
  ~MetalBackend() override;

  void* alloc(size_t bytes) override;
  void* alloc_for_host(size_t bytes) override;
  void free(void* p, size_t bytes) override;
  const char* name() const override { return kName; }
  size_t working_bytes() const override { return most_work_; }
  void set_poll(Poll* poll) override { poll_ = poll; }
  void set_class(NumericClass c) override;
  Backend* sibling(const Shape& shape) const override;
  void submit() override;
  Latch* latch() override;
  void wait() override;
  void abandon() noexcept override;
  bool device_work(DeviceWork* work) const override {
    *work = {issued_, stream_->device_seconds()};
    return true;
  }
  // Row products alone, for measurements: n rows of activations, one behind the other.
  void product(const Matrix& m, const float* x, int n, float* out) { linear(m, x, m.cols, n, out, m.rows, true); }

  void embed(const EmbedArgs&) override;
  void hc_read(const HcReadArgs&) override;
  void hc_write(const HcWriteArgs&) override;
  void engram(const EngramArgs&) override;
  void attn_in(const AttnInArgs&) override;
  void attn_query(const AttnQueryArgs&) override;
  void compress(const CompressArgs&) override;
  void index_query(const IndexQueryArgs&) override;
  void select(const SelectArgs&) override;
  void attend(const AttendArgs&) override;
  void attn_out(const AttnOutArgs&) override;
  void route(const RouteArgs&) override;
  void moe(const MoeArgs&) override;
  void head(const HeadArgs&) override;
  void stream_mean(const StreamMeanArgs&) override;
  void draft_main(const DraftMainArgs&) override;
  void draft_window(const DraftWindowArgs&) override;
  void draft_attend(const DraftAttendArgs&) override;
  void collapse(const CollapseArgs&) override;
  void markov(const MarkovArgs&) override;

 private:
  // One dispatch. `args` goes to buffer 0, the buffers to 1, 2, ...; `threads` is a multiple of 32, at most 1,024.
  template <class A>
  void encode(const char* kernel, Constants constants, const A& args, std::initializer_list<Argument> buffers, Grid grid, int threads,
              size_t threadgroup_bytes = 0) {
    static_assert(std::is_trivially_copyable_v<A> && sizeof(A) <= 4096);
    before_dispatch();
    encode_now(kernel, constants, &args, sizeof(A), buffers, grid, threads, threadgroup_bytes);
  }
  void encode_now(const char* kernel, Constants constants, const void* args, size_t args_bytes, std::initializer_list<Argument> buffers,
                  Grid grid, int threads, size_t threadgroup_bytes);

  // Row products of one matrix (metal/linear.h): out[i * ldo + r], r < rows, from row row0 of m on.
  struct Product {
    const Matrix* m;
    int row0, rows;
    const float* x;
    int64_t x_stride;
    float* out;
    int64_t ldo;
    bool round;           // the results, where the mode rounds
    int group_rows = 0;   // of every so many rows ...
    int64_t group_x = 0;  // ... the activations begin so much further on (attn_out)
  };
  void linear(const Product& product, int n);
  void linear(const Matrix& m, const float* x, int64_t x_stride, int n, float* out, int64_t ldo, bool round);
  // Activation quantiser in place, mode fp8 only: n rows of `width` at stride.
  void quantise(float* x, int64_t stride, int width, int n);

  template <class T>
  T* temp(Temp which, int64_t n) {
    return static_cast<T*>(temp_bytes(which, static_cast<size_t>(n) * sizeof(T)));
  }
  // attend and draft_attend: n rows whose longest list has `longest` places (attend.cpp).
  void attend_rows(AttendParams args, const AttendBuffers& buffers, int64_t n, int64_t longest);

  struct MoeGroups {  // of many tokens' pairs by expert (metal/moe.h)
    const int32_t* ints = nullptr;
    int64_t n_ints = 0, pairs_at = 0;
    int64_t most = 0;  // groups, or experts of a tile
    int tile = 0;      // pairs of a group, at most
  };
  void moe_up(const MoeArgs& a, const ExpertTable& table, const MoeGroups& groups);
  void moe_many(const MoeArgs& a, const ExpertTable& table);
  void moe_down_many(const MoeArgs& a, const ExpertTable& table, const MoeGroups& groups, int64_t row0, int64_t rows);
  // Bound from p on, of which elements first .. first + n - 1 are written.
  template <class T>
  Argument writes_from(T* p, int64_t first, int64_t n) const {
    Argument a = writes(p + first, n);
    device_.find(p, &a.place);
    return a;
  }
  void* temp_bytes(Temp which, size_t bytes);
  // A run of n rows begins: blocks for far more or for fewer rows go, so that a session that decodes holds little and a
  // longer run not both.
  void begin_run(int n);
  void free_retired();
  // An operation whose last dispatch may take in the hc_write that follows: issued with it, or, when something else
  // comes, with null.
  using Finish = std::function<void(const HcWriteArgs*)>;
  void finish_later(const float* y, int n, Finish finish);
  void before_dispatch() {
    if (finish_) finish_now(nullptr);
  }
  void finish_now(const HcWriteArgs* write);
  // Called by operations on many rows: hands over what is issued, and asks the poll. Throws Cancelled.
  void breathe(int n);

  const Shape& s_;
  const bool round_;  // bf16 and fp8 round to bf16
  const bool quant_;  // fp8 quantises activations in front of fp8/fp4 slots
  const Activations activations_;
  Device& device_;
  std::shared_ptr<Stream> stream_;
  Poll* poll_ = nullptr;
  Finish finish_;
  const float* finish_y_ = nullptr;
  int finish_n_ = 0;
  struct Block {
    Ref<MTL::Buffer> buffer;
    size_t bytes = 0;
  };
  std::vector<Block> temps_;
  size_t work_ = 0, most_work_ = 0;  // bytes of temps_ and retired_; the most since begin_run() let go of them
  int run_rows_ = 0;
  int64_t issued_ = 0;  // dispatches
  std::vector<std::shared_ptr<const void>> held_;  // what dispatches that run may still use; let go by wait()
  std::vector<Block> retired_;  // too small, but perhaps still in use; freed by wait()
};

}  // namespace ds4::metal
