// Engram rows for everybody: tables, hot rows, and the threads that read.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <vector>

#include "base/process.h"
#include "engram/cache.h"
#include "engram/pool.h"
#include "engram/reader.h"
#include "engram/request.h"
#include "engram/table.h"

namespace ds4 {

struct EngramOptions {
  bool ram = false;         // take the tables into memory
  bool direct = false;      // read around the page cache
  int threads = 64;         // most reads at the same time; half of them for steps alone
  int64_t cache_bytes = 0;  // for hot rows of all tables; no use with ram
};

// How long reads took: bucket b counts those of less than 2^(b / 4) microseconds.
using LatencyCounts = std::array<int64_t, 96>;

struct EngramCounters {
  int64_t rows = 0;        // asked for
  int64_t unique = 0;      // of them, after duplicates inside a request
  int64_t hits = 0;        // of the unique ones, found in the cache
  int64_t reads = 0;       // spans read
  int64_t bytes = 0;       // from disk
  double read_seconds = 0;  // sum over the reading threads
  LatencyCounts latency{};
};

class Engram {
 public:
  using Ticket = std::shared_ptr<Request>;

  // Opens the files; takes nothing into memory yet. Throws EngramError, OptionError.
  Engram(std::vector<TableFiles> tables, const EngramOptions& options,
         std::unique_ptr<FileReader> reader = std::make_unique<FileReader>());
  ~Engram() = default;

  // With ram: reads the tables, before anything is asked for. progress as Poll; throws Cancelled.
  void load(Poll* poll);

  int n_tables() const { return static_cast<int>(tables_.size()); }
  const EngramTable& table(int i) const { return *tables_[static_cast<size_t>(i)]; }
  const EngramOptions& options() const { return options_; }
  const RowCache& cache() const { return cache_; }
  int n_threads() const { return pool_.n_threads(); }

  // Starts to bring rows[i] of a table to out + i * row bytes. The memory must stay until the request is done or
  // abandoned. Few rows are looked up in the cache at once, so that a step whose rows are all there never waits.
  // In a forked child there are no threads, and the cache's locks are not to be trusted: rows are read here and now.
  Ticket request(int table, std::vector<int64_t> rows, uint8_t* out, Urgency urgency);
  void promote(const Ticket& ticket, Urgency urgency);  // somebody needs it sooner than was said
  void abandon(const Ticket& ticket);                   // after it, the request's memory may go

  EngramCounters counters() const;

 private:
  void prepare(const Ticket& ticket, bool inside_pool);
  void look_up(const Ticket& ticket, std::vector<int32_t>& missing);
  void read_part(Request& request, size_t part, ReadBuffer& buffer);
  void accept(Request& request, const Span& span, const uint8_t* rows);
  void count_read(Request& request, int64_t bytes, int64_t nanoseconds);
  ReadPool::Spread spread() const;
  Ticket read_alone(const Ticket& ticket);

  const HomeProcess home_;
  const EngramOptions options_;
  std::unique_ptr<FileReader> reader_;
  std::vector<std::unique_ptr<EngramTable>> tables_;
  RowCache cache_;
  std::atomic<int64_t> rows_{0}, unique_{0}, hits_{0}, reads_{0}, bytes_{0}, read_ns_{0};
  std::array<std::atomic<int64_t>, 96> latency_{};
  std::atomic<float> mean_read_us_{100.0f};  // of the recent reads
  ReadPool pool_;  // last: its threads end before anything else goes
};

}  // namespace ds4
