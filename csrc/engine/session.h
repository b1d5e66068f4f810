// One session: its state and the runs that advance it. Not thread-safe; the binding guards it.
#pragma once

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/cone.h"
#include "engine/drafter.h"
#include "engine/engram_feed.h"
#include "engine/fault.h"
#include "engine/ledger.h"
#include "engine/model.h"
#include "engine/scratch.h"
#include "engine/trace.h"
#include "kv/state.h"

namespace ds4 {

enum class Logits : uint8_t { none, last, all };

// Where a state is to be put together from: what it will hold of its window rows.
enum class Restored : uint8_t { rows, encoder };

class Session {
 public:
  // Window rows that the last run of a prefill computes beyond those that are needed, at most `retain`: so far one can
  // go back for nothing.
  static constexpr int64_t kSlack = 256;

  // With a drafter (of the same model) its part of the session is kept in step with the state.
  // every_row: never leave out rows of the decoder layers. The same bits, and window rows for all of `retain`.
  Session(std::shared_ptr<const Model> model, int64_t context, int64_t retain, int64_t chunk,
          std::shared_ptr<const DrafterModel> drafter = nullptr, bool every_row = false);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  State& state() { return state_; }
  const State& state() const { return state_; }
  const Model& model() const { return *model_; }
  int64_t chunk() const { return chunk_; }

  // Appends n tokens (1 .. chunk). `out` receives the wanted rows of f32 [vocab]; null leaves them where logits() finds
  // them. On any exception the state holds the tokens that it held before the call.
  // after: without logits, so many tokens of the same prefill will follow. Layers whose rows nobody will need are left
  // out (engine/cone.h); should other tokens follow, what they need is computed then.
  void run(const int32_t* tokens, int64_t n, Logits logits, float* out, Poll* poll, int64_t after = 0,
           Trace* trace = nullptr, NumericClass c = NumericClass::canonical);

  // The wanted rows of the last run, until anything else is done with the session.
  const float* logits() const { return t_.logits; }

  // What the run after the next one will probably append (at most a chunk): its Engram rows are read while the next
  // run computes. Only a hint; a run that comes otherwise reads its own.
  void expect(const int32_t* tokens, int64_t n);

  // Returns how many tokens were run again: 0 or 1. Throws StateError when window rows of the position are gone.
  int64_t truncate(int64_t position, Poll* poll);
  void truncate(const Mark& mark);
  // Goes back to any earlier position, exactly: a truncation where the window rows are kept, else a replay of what
  // they depend on. `end`: tokens up to there will be prefilled next, so only what they need is replayed; 0: the state
  // is to be complete. Returns how many tokens were run again.
  int64_t rewind(int64_t position, int64_t end, Poll* poll);
  // Most tokens that a replay runs where only window rows of the decoder layers are missing.
  int64_t decoder_cone() const;
  // Computes the window rows in front of the position that are missing (State::ready); returns tokens run.
  int64_t complete(int64_t end, Poll* poll);
  // The first token that rewind(position, end) runs again; `position`: none.
  int64_t rewind_start(int64_t position, int64_t end) const;
  // The same of a complete() after a restore.
  int64_t restore_start(int64_t position, int64_t end, Restored from) const;
  std::shared_ptr<Mark> mark(Poll* poll);
  // Equal state, shared memory until one of the two writes.
  std::unique_ptr<Session> fork();

  // Logits after the last token from what the last run left; false when that is not known any more.
  bool last_logits(float* out, Poll* poll);

  // A restore: rows of the first tokens stay, others are put into the state, then it gets its tokens.
  void begin_restore(int64_t keep);
  void finish_restore(const int32_t* tokens, const NumericClass* classes, int64_t n);

  // The frontier at the position: window rows, open pair, and what last_logits needs if it is known. encoder: window
  // rows of the encoder layers only, which is what a long prefill goes on from.
  std::vector<uint8_t> export_frontier(bool encoder);
  void import_frontier(const uint8_t* data, size_t bytes);
  // Pages in ascending order (from begin_restore or the last read_pages on); with tokens the restore is finished, and
  // the frontier, if there is one, is read at the same time. Returns what is damaged, counting a frontier after the
  // pages: after a bad page the session is where begin_restore left it, after a bad frontier it lacks window rows.
  struct FrontierSource {
    int fd;
    int64_t offset;
    size_t bytes;
    uint64_t sum;
  };
  std::optional<BadSource> read_pages(const std::vector<PageSource>& pages, const std::vector<int32_t>& tokens,
                                      const std::vector<NumericClass>& classes, const std::optional<FrontierSource>& frontier);

  // Null without one, or after drop_drafter(): what a caller does when the drafter failed.
  Drafter* drafter() { return drafter_.get(); }
  void drop_drafter() { drafter_.reset(); }
  // Why the session dropped it itself: it failed beside a run, which went on. Empty while it works.
  const std::string& drafter_fault() const { return drafter_fault_; }

  size_t scratch_bytes() const { return scratch_bytes_.total() + feed_.bytes(); }
  size_t working_bytes() const { return backend_->working_bytes(); }  // of the operations; the drafter's are its own
  const FeedCounters& engram_counters() const { return feed_.counters(); }

  // From now on every operation, the drafter's too, is counted and timed; calling it again starts anew.
  void start_ledger();
  const Ledger* ledger() const { return ledger_; }

  // For tests: what is to fail, where and when (engine/fault.h).
  Faults& faults() { return faults_; }

  // For benchmarks only: a session at `position` (0 before) whose caches hold random rows of plausible size and whose
  // tokens are random, as if a prompt of that length had been read. What it generates means nothing.
  void fill_for_benchmark(int64_t position, uint64_t seed);

 private:
  // Work of the drafter beside the target's: a failure drops the drafter and nothing else.
  template <class F>
  void beside(F f) {
    if (!drafter_ || !watching_) return;
    try {
      f(*drafter_);
    } catch (const std::exception& error) {
      drafter_fault_ = error.what();
      drafter_.reset();
    }
  }
  Session(const Session& parent, int);
  Aim aim_at(int64_t position, int64_t end) const;
  Aim aim_of_run(int64_t n, bool every_row) const;
  Cone run_cone(const Aim& aim) const;
  Cone replay_cone(const Aim& aim, const std::vector<int64_t>& low) const;
  int64_t bring(const Aim& aim, Poll* poll);
  void replay(const Cone& cone, Poll* poll);
  void run_rows(const int32_t* tokens, int64_t n, const Cone& cone, Logits logits, float* out, Poll* poll, Trace* trace, NumericClass c);
  void run_layers(const std::vector<LayerRows>& rows, Poll* poll, Trace* trace);
  void keep_final(int64_t n);
  void import_frontier(const State::Reader& read, size_t bytes);
  void read_frontier(const FrontierSource& from);
  void accept_frontier();
  int frontier_layers(bool encoder) const { return encoder ? encoder_layers(model_->shape) : model_->shape.n_layers; }
  size_t final_floats() const;
  void check_tokens(const int32_t* tokens, int64_t n) const;
  void check_finite(int64_t n, int64_t first) const;
  void free_scratch();
  void reserve_scratch(int64_t n, int64_t n_logits);
  void start(const int32_t* tokens, int64_t n);
  void layer(int l, const LayerRows& r, Poll* poll, Trace* trace);
  void attention_in(int l, const LayerRows& r);
  void attention(int l, const LayerRows& r, Trace* trace);
  void engram(int l, const LayerRows& r, Poll* poll, const Trace* trace);
  void select(int l, const LayerRows& r, Trace* trace);
  Rope rope(int l, const Scratch& t) const;
  void head(int64_t n, int64_t n_logits, Trace* trace);
  void take_logits(int64_t n_logits, float* out) const;

  std::shared_ptr<const Model> model_;
  std::unique_ptr<Backend> backend_;
  Ledger* ledger_ = nullptr;  // backend_, once the ledger is on
  State state_;
  Faults faults_;
  std::unique_ptr<Drafter> drafter_;
  std::string drafter_fault_;
  int64_t chunk_;
  int64_t slack_;
  bool every_row_;
  uint8_t *scratch_base_ = nullptr, *scratch_host_ = nullptr;
  ScratchBytes scratch_bytes_;
  Scratch t_{};
  EngramFeed feed_;
  std::vector<int32_t> line_;      // the last tokens of the state, those of this run, those expected after it
  std::vector<int32_t> expected_;  // after the next run
  bool replaying_ = false;
  bool watching_ = true;        // does the drafter see the runs?
  std::vector<float> final_;    // stream [C][D] and mix [C] after the last token
  bool final_known_ = false;      // of a frontier that is being taken in
  int frontier_layers_ = 0;       // likewise
  int64_t draft_rows_ = 0;        // likewise
  int64_t final_position_ = -1;  // the position that final_ belongs to
};

}  // namespace ds4
