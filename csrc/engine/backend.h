// The contract: what the engine asks of a back end, one pure virtual function per fused operation.
//
// There are no defaults: a back end that lacks an operation does not compile. Decorators (a ledger that measures, a
// check that runs two back ends) implement the same contract and wrap another one. All pointers in the argument
// structs are memory of the back end (alloc()); the engine never looks inside. Shapes are row-major; n is the number
// of rows (tokens) of this call. Every operation computes each row in the canonical order of docs/numerics.md, so a
// row's result does not depend on n, on the thread count or on the instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/shape.h"
#include "engine/weights.h"

namespace ds4 {

class Poll;

// How the heavy products of a run are summed (docs/numerics.md): attention projections, the Engram projection, experts.
// A row's result depends on the class, and within a class on nothing else.
enum class NumericClass : uint8_t { canonical, matrix };

// cos and sin of position * frequency for a run of positions: [n][rope_dim / 2] each.
struct Rope {
  const float* cos = nullptr;
  const float* sin = nullptr;
};

// A ring of packed rows: row of position p at base + (p mod capacity) * row_bytes.
struct RowRing {
  uint8_t* base = nullptr;
  int64_t capacity = 0;
  int row_bytes = 0;
  uint8_t* row(int64_t p) const { return base + (p % capacity) * row_bytes; }
};

struct EmbedArgs {
  int n;
  const int32_t* tokens;  // [n]
  const Matrix* table;
  float* stream;  // [n][C][D] out
  float* mix;     // [n][C] out: (1, 0, ...)
};

struct HcReadArgs {  // coefficients of the stream, and collapse + norm with the mix of the sub-layer before
  int n;
  const float* stream;  // [n][C][D]
  const float* mix;     // [n][C]
  const HcWeights* w;
  float* x;      // [n][D] normed input of the sub-layer
  float* xq;     // [n][D] the same through the activation quantiser (mode fp8), else equal to x; may be x itself
  float* pre;    // [n][C]
  float* post;   // [n][C]
  float* comb;   // [n][C][C]
};

struct HcWriteArgs {  // expand: stream_k = post_k y + sum_j comb_jk stream_j
  int n;
  const float* y;  // [n][D]
  const float* post;
  const float* comb;
  float* stream;  // in place
};

struct EngramArgs {
  int n;
  const uint8_t* rows;  // [n][columns][row bytes]: e4m3 codes, then e8m0 scales per 32
  const EngramWeights* w;
  float* stream;  // in place
};

struct AttnInArgs {  // both down-projections: low-rank query, and the window row
  int n;
  int64_t position;  // of row 0
  const float* xq;
  const AttentionWeights* w;
  Rope rope;
  float* qr;      // [n][q_rank] normed (quantised in mode fp8)
  RowRing window;  // rows position .. position + n - 1 are written
};

struct AttnQueryArgs {
  int n;
  const float* qr;
  const AttentionWeights* w;
  Rope rope;
  float* q;  // [n][H][hd] rotated
};

struct CompressArgs {
  int n;
  int64_t position;
  int ratio;
  const float* x;
  const CompressorWeights* w;
  Rope rope;          // rows for positions first_rope .. position + n - 1
  int64_t first_rope;
  RowRing pending;     // ratio 2: unpooled rows of recent positions, [2][hd] f32 each
  uint8_t* rows;       // compressed cache, entry j at rows + j * compressed_row_bytes
  uint8_t* index_rows;  // index keys, entry j at index_rows + j * index_row_bytes
};

struct IndexQueryArgs {
  int n;
  const float* qr;
  const float* x;
  const IndexerWeights* w;
  Rope rope;
  int8_t* codes;   // [n][heads][dim] twice the fp4 value
  float* scales;   // [n][heads][dim / 32], a quarter of the scale (so that code products need no halving)
  float* weights;  // [n][heads]
};

struct SelectArgs {
  int n;
  int64_t position;
  int ratio;
  const int8_t* codes;
  const float* scales;
  const float* weights;
  const uint8_t* index_rows;
  int32_t* selected;          // [n][index_topk] ascending entries
  int32_t* n_selected;        // [n]
  int32_t* made_blocks;       // [n][candidate_blocks] ascending, written by the candidate source; else null
  int32_t* n_made_blocks;     // [n]
  const int32_t* use_blocks;  // [n][candidate_blocks] read by later index layers; else null
  const int32_t* n_use_blocks;
  float* scores_out;  // [n][scores_stride] every visible entry's score, for traces and tests; else null
  int64_t scores_stride;
};

struct AttendArgs {
  int n;
  int64_t position;
  const float* q;
  RowRing window;
  const uint8_t* compressed;  // null: window only
  const int32_t* selected;    // [n][index_topk]
  const int32_t* n_selected;
  const float* sink;
  Rope rope;
  float* o;      // [n][H][hd], un-rotated
  float* o_raw;  // the same before un-rotation, for traces; else null
};

struct AttnOutArgs {
  int n;
  const float* o;
  const AttentionWeights* w;
  float* low;  // [n][o_groups * o_rank] scratch
  float* y;    // [n][D]
};

struct RouteArgs {
  int n;
  const float* x;
  const MoeWeights* w;
  float* scores;     // [n][n_experts] scratch
  int32_t* experts;  // [n][top_k] ascending ids
  float* weights;    // [n][top_k]
};

struct MoeArgs {
  int n;
  const float* xq;
  const MoeWeights* w;
  const int32_t* experts;
  const float* weights;
  float* mid;  // [n][top_k + 1][expert_dim] scratch, the shared expert last
  float* y;    // [n][D]
};

struct HeadArgs {
  int n;
  const float* stream;
  const float* mix;
  const float* norm;
  const Matrix* head;
  float* x;       // [n][D] normed rows
  float* logits;  // [n][vocab]
};

struct StreamMeanArgs {  // what the drafter keeps of a target layer's input
  int n;
  const float* stream;  // [n][C][D]
  float* out;           // row i at out + i * stride: [D]
  int64_t stride;
};

struct DraftMainArgs {  // kept rows of the target -> the drafter's input, normed (quantised in mode fp8)
  int n;
  const float* main;  // [n][targets D]
  const Matrix* w;    // [D, targets D]
  const float* norm;
  float* x;  // [n][D]
};

struct DraftWindowArgs {  // context rows of one draft stage
  int n;
  int64_t position;  // of row 0
  const float* x;    // from draft_main
  const AttentionWeights* w;
  Rope rope;
  RowRing window;  // rows position .. position + n - 1 are written
};

struct DraftAttendArgs {  // every row sees all context rows and all rows of the block
  int n;
  int64_t position;  // of block row 0; context rows are first .. position - 1 (at most `window` of them)
  int64_t first;
  const float* q;
  RowRing window;
  RowRing block;
  const float* sink;
  Rope rope;
  float* o;  // [n][H][hd], un-rotated
};

struct CollapseArgs {
  int n;
  const float* stream;
  const float* mix;
  float* x;  // [n][D], not normed
};

struct MarkovArgs {  // one draft row: logits given the token before it, and the confidence in it
  int32_t previous;
  const Matrix* embed;       // [vocab, rank]
  const Matrix* head;        // [vocab, rank]
  const Matrix* confidence;  // [1, D + rank]
  const float* x;     // [D] collapsed, not normed
  const float* base;  // [vocab] logits of the block
  float* logits;          // [vocab] out
  float* confidence_out;  // [1], or null
  float* top;             // [1] probability of the likeliest token at temperature 1, or null
};

// What a device waits for that another thread brings.
class Latch {
 public:
  virtual void open() noexcept = 0;  // by any thread; again does nothing

 protected:
  ~Latch() = default;
};

// What a device did so far of what one back end issued.
struct DeviceWork {
  int64_t dispatches = 0;
  double seconds = 0.0;  // of the device, in all that was waited for; siblings' included
};

class Backend {
 public:
  virtual ~Backend() = default;

  // Memory that the operations may touch; zeroed, committed as it is written.
  virtual void* alloc(size_t bytes) = 0;
  // The same for what the host writes or reads in every run.
  virtual void* alloc_for_host(size_t bytes) = 0;
  virtual void free(void* p, size_t bytes) = 0;
  // This part of alloc() will be written soon and a little at a time: commit it now, which costs less than by and by.
  virtual void commit(void* p, size_t bytes) { (void)p, (void)bytes; }
  // May pages of alloc() be replaced by mappings of the same size? Then forks share memory; else they copy it.
  virtual bool remappable() const { return false; }
  virtual const char* name() const = 0;
  // What operations keep between calls beside alloc(): the most since they last let go of it.
  virtual size_t working_bytes() const = 0;

  // Another back end for other sizes whose operations are ordered with this one's (the drafter's). It shares memory with
  // this one. The caller owns it; the shape must outlive it.
  virtual Backend* sibling(const Shape& shape) const = 0;

  // Operations may only be issued when they return. Before anyone but the back end looks at memory they write, or writes
  // memory they read: wait(). It throws when the device failed.
  virtual void wait() = 0;
  // The caller is about to wait for something else: what was issued so far may run meanwhile.
  virtual void submit() = 0;
  // Operations issued from now on run once the latch is open, those issued so far at once. Null: the device cannot wait, so
  // the caller does, before it issues them. It is the back end's and may be used for something else after the next wait()
  // or abandon(), which do not return while it is closed.
  virtual Latch* latch() = 0;
  // After a failure: nothing that was issued runs any more when this returns, done or not.
  virtual void abandon() noexcept = 0;

  // False: there is no device, so that the time of the calls is the time of the work.
  virtual bool device_work(DeviceWork* work) const = 0;

  // The stop question for the calls that follow, or null. An operation that was stopped throws Cancelled.
  virtual void set_poll(Poll* poll) = 0;
  // The numeric class of the calls that follow. Throws OptionError when this back end does not have it.
  virtual void set_class(NumericClass c) = 0;

  virtual void embed(const EmbedArgs&) = 0;
  virtual void hc_read(const HcReadArgs&) = 0;
  virtual void hc_write(const HcWriteArgs&) = 0;
  virtual void engram(const EngramArgs&) = 0;
  virtual void attn_in(const AttnInArgs&) = 0;
  virtual void attn_query(const AttnQueryArgs&) = 0;
  virtual void compress(const CompressArgs&) = 0;
  virtual void index_query(const IndexQueryArgs&) = 0;
  virtual void select(const SelectArgs&) = 0;
  virtual void attend(const AttendArgs&) = 0;
  virtual void attn_out(const AttnOutArgs&) = 0;
  virtual void route(const RouteArgs&) = 0;
  virtual void moe(const MoeArgs&) = 0;
  virtual void head(const HeadArgs&) = 0;

  // For the drafter.
  virtual void stream_mean(const StreamMeanArgs&) = 0;
  virtual void draft_main(const DraftMainArgs&) = 0;
  virtual void draft_window(const DraftWindowArgs&) = 0;
  virtual void draft_attend(const DraftAttendArgs&) = 0;
  virtual void collapse(const CollapseArgs&) = 0;
  virtual void markov(const MarkovArgs&) = 0;
};

}  // namespace ds4
