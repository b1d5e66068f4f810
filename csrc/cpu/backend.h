// The CPU back end of one instruction set. Its families are in the files of the same names.
#pragma once

#include "base/threads.h"
#include "cpu/isa.h"
#include "cpu/matrix.h"
#include "cpu/rows.h"
#include "engine/backend.h"

namespace ds4::cpu::DS4_ISA {

class CpuBackend final : public Backend {
 public:
  CpuBackend(const Shape& shape, Activations activations, ThreadPool& pool, const MatrixClass& matrix);
  ~CpuBackend() override;

  void* alloc(size_t bytes) override;
  void* alloc_for_host(size_t bytes) override { return alloc(bytes); }
  void free(void* p, size_t bytes) override;
  void commit(void* p, size_t bytes) override;
  bool remappable() const override { return true; }
  const char* name() const override;
  size_t working_bytes() const override;
  Backend* sibling(const Shape& shape) const override;
  void wait() override {}  // every operation is done when it returns
  void submit() override {}
  Latch* latch() override { return nullptr; }
  void abandon() noexcept override {}
  bool device_work(DeviceWork*) const override { return false; }
  void set_poll(Poll* poll) override { poll_ = poll; }
  void set_class(NumericClass c) override { class_ = c; }

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
  // One product for linear(): `rows` rows of m from row0, into out[i * ldo + r].
  struct Product {
    const Matrix* m;
    int row0, rows;
    XRows x;
    float* out;
    int64_t ldo;
    bool round;
  };
  // All products in one parallel loop. heavy: of the numeric class at hand; others are always canonical.
  void linear(const Product* products, int n_products, int n, bool heavy = false);
  void linear(const Matrix& m, XRows x, int n, float* out, int64_t ldo, bool round, bool heavy = false);
  bool matrix() const { return class_ == NumericClass::matrix; }
  // dot_block and its scratch in the numeric class at hand.
  size_t class_scratch(int k) const { return matrix() ? matrix_.scratch(k) : dot_scratch(k); }
  void class_block(const Matrix& m, int r0, int nr, XRows x, int n, float* out, int64_t ldo, float* scratch) const {
    if (matrix()) return matrix_.block(m, r0, nr, {x.base, x.stride, x.index}, n, out, ldo, scratch);
    dot_block(m, r0, nr, x, n, out, ldo, scratch);
  }

  template <class F>
  void loop(int64_t n, F f) {
    if (!parallel_for(*pool_, poll_, n, f)) throw_cancelled();
  }
  [[noreturn]] static void throw_cancelled();

  void engram_slice(const EngramArgs& a, int64_t first, int n);
  void index_slice(const IndexQueryArgs& a, int64_t first, int n);

  float* scratch(int worker) { return scratch_ + worker * static_cast<int64_t>(scratch_floats_); }
  void need_scratch(size_t floats);     // per worker
  float* need_temp(size_t floats);      // one block per back end, for the operation that runs

  const Shape& s_;
  const bool round_;   // bf16 and fp8 round to bf16
  const bool quant_;   // fp8 quantises activations in front of fp8/fp4 slots
  ThreadPool* pool_;
  const MatrixClass& matrix_;
  NumericClass class_ = NumericClass::canonical;
  Poll* poll_ = nullptr;
  float* scratch_ = nullptr;
  size_t scratch_floats_ = 0;
  float* temp_ = nullptr;
  size_t temp_floats_ = 0;
};

}  // namespace ds4::cpu::DS4_ISA
