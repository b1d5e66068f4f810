// The drafter (DSpark): guesses the tokens that follow, for the target to verify in one step.
//
// It never touches what the target computes. It reads the target's stream at a few layers (capture), keeps a window of
// rows made from it in the extra rings of the session's State, and is asked for drafts between two steps.
#pragma once

#include <memory>
#include <vector>

#include "engine/cone.h"
#include "engine/fault.h"
#include "engine/ledger.h"
#include "engine/model.h"
#include "engine/scratch.h"
#include "kv/state.h"

namespace ds4 {

struct DraftSizes {
  int block = 0;       // rows of a draft block, always computed together
  int32_t noise = 0;   // token of all rows but the first
  int markov_rank = 0;
  std::vector<int> target_layers;  // whose inputs are captured, ascending
};

constexpr int64_t kDraftSlack = 256;  // rows captured beyond the window, so that going back a little finds a full one

// Weights and sizes, shared by the sessions of one target model.
struct DrafterModel {
  std::shared_ptr<const Model> target;
  Shape shape;  // the target's with the drafter's experts and stages
  DraftSizes sizes;
  DrafterWeights weights;
  std::vector<std::vector<float>> vectors;
  std::shared_ptr<void> adopted;  // as Model::adopted

  int n_stages() const { return static_cast<int>(weights.stages.size()); }
  // Names what the rows of its windows depend on beside the target's: sizes, and samples of the weights they are made
  // with.
  uint64_t rows_id() const;
  int main_dim() const { return static_cast<int>(sizes.target_layers.size()) * shape.hidden; }
};

// The drafter's part of one session.
class Drafter {
 public:
  static constexpr int64_t kBatch = 64;  // captured rows that are projected together

  // `state` has n_stages() extra windows and outlives this, as do `faults`. Its operations are ordered with those of
  // `backend`, the session's.
  Drafter(std::shared_ptr<const DrafterModel> model, State& state, const Backend& backend, Faults& faults);
  ~Drafter();
  Drafter(const Drafter&) = delete;
  Drafter& operator=(const Drafter&) = delete;

  const DrafterModel& model() const { return *model_; }
  std::shared_ptr<const DrafterModel> shared_model() const { return model_; }
  // Bytes of a session's drafter beside its rings in the state.
  static size_t bytes(const DrafterModel& model);
  size_t working_bytes() const { return backend_->working_bytes(); }

  // Around a run of the target: capture() sees the stream that enters every layer, commit() follows the state's.
  // Rows that do not reach all captured layers are skipped.
  void begin(const std::vector<LayerRows>& rows);
  void capture(int layer, int64_t n, const float* stream);
  void commit();
  // The state went back: what was captured beyond its position is dropped.
  void follow();
  // The state came here without runs that were captured: the window fills anew.
  void restart();
  // Captured rows that are not in the rings yet are put there: those of the window and `back` rows before it. A draft
  // does it for the window; before a mark or a fork, whose owners have no captured rows, all of them go.
  void settle(Poll* poll, int64_t back);
  // The newest of those that a draft would see, half a window at most: the first draft guesses as well with them
  // (docs/dspark.md), and the others may come before the next one. Returns how many were put there.
  int64_t settle_some(Poll* poll);
  // How many rows that would be for a draft now.
  int64_t unsettled() const;

  // Drafts after `anchor`, the token that the target chose for state.position(). start() runs the stages; row(i)
  // then gives the logits [vocab] of the i-th draft, i < n_rows, when the token before it is `previous`, and, if asked,
  // the confidence head's logit and the probability of the likeliest token. Rows may be asked for in any order, and
  // again; each is there until the next is asked for.
  // settled: windows that are not full stay so, only what the state got since comes into them.
  void start(int32_t anchor, int n_rows, Poll* poll, bool settled = false);
  struct Signals {
    float confidence, top;
  };
  const float* row(int i, int32_t previous, Signals* signals = nullptr);
  int n_rows() const { return n_rows_; }  // of the draft at hand

  // From now on every operation of start() and row() is counted and timed; calling it again starts anew.
  void start_ledger();
  const Ledger* ledger() const { return ledger_; }

  // Context rows that a draft would see now with windows as full as they can be, at most `window`.
  int64_t n_context() const;
  // The context as bytes, for a frontier (docs/formats-store.md); nothing when there is none. settle() comes before.
  std::vector<uint8_t> export_context() const;
  // Takes it at the state's position, and returns how many rows it has; they count after accept_context(rows). Bytes of
  // another drafter are read and left: 0 rows. Throws StoreError for bytes that no drafter has written.
  int64_t import_context(const State::Reader& read, size_t bytes);
  void accept_context(int64_t rows);
  // main_hidden [rows, targets D] of the captured rows that are not in the rings yet, oldest first; for tests.
  std::vector<float> captured() const;

 private:
  struct Sizes {
    int64_t capacity = 0;
    size_t parts[10] = {}, scratch = 0, total = 0;
  };
  static Sizes sizes_of(const DrafterModel& model);
  int64_t reachable() const;
  void project(int64_t first, int64_t end, Poll* poll);
  void block(int32_t anchor, int n_rows, Poll* poll);
  void stage(int i);
  void fill_windows(Poll* poll, int64_t first);
  int64_t wanted(int64_t back) const;
  int64_t in_windows() const;  // rows that are there, once new ones are
  void done();
  RowRing window(int stage) const { return state_.window(model_->target->shape.n_layers + stage); }

  std::shared_ptr<const DrafterModel> model_;
  State& state_;
  Faults& faults_;
  std::unique_ptr<Backend> backend_;
  Ledger* ledger_ = nullptr;  // backend_, once the ledger is on
  int64_t capacity_;        // rows of main_
  float* main_ = nullptr;   // [capacity][targets D] a ring of captured rows
  float* x_ = nullptr;      // [batch][D]
  uint8_t* block_ = nullptr;  // packed rows of the block
  float* collapsed_ = nullptr;  // [block][D]
  float *cos_ = nullptr, *sin_ = nullptr;  // [batch][rope_dim / 2] of context rows
  float *block_cos_ = nullptr, *block_sin_ = nullptr;  // [block][rope_dim / 2]
  float* signals_ = nullptr;     // a row's confidence and top
  float* row_logits_ = nullptr;  // [vocab]
  uint8_t* own_base_ = nullptr;  // all of the above and the scratch of a block
  size_t own_bytes_ = 0;
  Scratch t_{};
  int64_t filled_ = 0;      // rows from state_.extra_low() up to this position are in the rings
  int64_t captured_low_ = 0;  // from here on rows are in main_
  bool angles_busy_ = false;  // cos_ and sin_ belong to operations that may still run
  int64_t skipped_ = 0;     // first rows of the run at hand that are not kept
  int n_rows_ = 0;          // of the draft at hand
};

}  // namespace ds4
