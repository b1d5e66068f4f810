#include "engram/engram.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <string>
#include <thread>

#include "base/error.h"

namespace ds4 {

namespace {

constexpr size_t kFew = 512;               // rows that the caller looks up itself
constexpr int64_t kGapBytes = 4096;        // a read may bring this much that nobody wants, rather than be two
constexpr int64_t kSpanBytes = 32 << 10;  // most bytes of one read
constexpr float kWorthAThreadUs = 50;      // of reading: about what it takes to wake one on a machine that computes
constexpr int64_t kMostGrain = 16;         // reads that a thread takes at a time
constexpr int kLoadThreads = 8;            // parts of a table that are read into memory at the same time
constexpr float kMostReadUs = 2000;        // of one read in their mean: one that hangs says little about the next
constexpr float kReadMemory = 1.0f / 128;  // of the newest read in their mean

uint64_t key_of(int table, int64_t row) {
  return (static_cast<uint64_t>(table) + 1) << 48 | static_cast<uint64_t>(row);
}

}  // namespace

Engram::Engram(std::vector<TableFiles> tables, const EngramOptions& options, std::unique_ptr<FileReader> reader)
    : options_(options),
      reader_(std::move(reader)),
      cache_(options.ram || tables.empty() ? 0 : options.cache_bytes, tables.empty() ? 1 : tables[0].dim + tables[0].dim / 32),
      pool_(options.threads) {
  if (options.threads < 1) throw OptionError("[engram] expected at least one reading thread");
  if (options.cache_bytes < 0) throw OptionError("[engram] expected a cache of 0 bytes or more");
  for (TableFiles& t : tables) {
    if (t.dim != tables[0].dim) throw CheckpointError("[engram] expected tables whose rows have the same size");
    if (t.n_rows < 1 || t.n_rows >= int64_t{1} << 48)
      throw CheckpointError("[engram] a table of " + std::to_string(t.n_rows) + " rows");
    if (t.dim < 32 || t.dim % 32 != 0 || t.codes.row_bytes + t.scales.row_bytes != t.dim + t.dim / 32)
      throw CheckpointError("[engram] rows of " + t.codes.path + ": expected " + std::to_string(t.dim + t.dim / 32) +
                            " bytes, got " + std::to_string(t.codes.row_bytes + t.scales.row_bytes));
  }
  for (TableFiles& t : tables) tables_.push_back(std::make_unique<EngramTable>(std::move(t), options.direct));
}

void Engram::load(Poll* poll) {
  if (!options_.ram) return;
  for (auto& table : tables_) {
    table->reserve();
    const int n = static_cast<int>(table->n_parts());
    // A request without rows, only to wait for the parts and to hear of errors.
    const auto parts = std::make_shared<Request>(0, std::vector<int64_t>(), 0, nullptr, Urgency::chunk);
    const auto left = std::make_shared<std::atomic<int>>(n);
    pool_.submit(parts.get(), Urgency::chunk, n, {1, std::min(kLoadThreads, options_.threads)}, [this, &table, parts, left](int64_t i, ReadBuffer&) {
      if (parts->stopped()) return;
      try {
        ReadBuffer buffer;  // a part is large: the thread's own buffer would keep it
        table->load_part(*reader_, buffer, i);
        if (left->fetch_sub(1) == 1) parts->finish();
      } catch (...) {
        parts->fail(std::current_exception());
      }
    });
    try {
      parts->wait(poll);
    } catch (...) {
      parts->abandon();
      pool_.drop(parts.get());
      throw;
    }
    table->loaded();
  }
}

Engram::Ticket Engram::request(int table, std::vector<int64_t> rows, uint8_t* out, Urgency urgency) {
  if (table < 0 || table >= n_tables()) throw OptionError("[engram] there is no table " + std::to_string(table));
  const size_t n = rows.size();
  rows_.fetch_add(static_cast<int64_t>(n), std::memory_order_relaxed);
  const Ticket ticket(new Request(table, std::move(rows), this->table(table).row_bytes(), out, urgency),
                      LeakInFork<Request>());
  if (home_.forked()) return read_alone(ticket);
  if (n <= kFew) {
    prepare(ticket, false);
  } else {
    pool_.submit(ticket.get(), urgency, 1, {1, 1}, [this, ticket](int64_t, ReadBuffer&) { prepare(ticket, true); });
  }
  return ticket;
}

Engram::Ticket Engram::read_alone(const Ticket& ticket) {
  const EngramTable& table = *tables_[static_cast<size_t>(ticket->table())];
  ReadBuffer buffer;
  std::vector<uint8_t> row(static_cast<size_t>(table.row_bytes()));
  try {
    ticket->sort();
    for (const Wanted& w : ticket->wanted()) {
      table.read(*reader_, buffer, w.row, 1, row.data());
      table.check_values(w.row, row.data());
      ticket->deliver(w, row.data());
    }
    ticket->finish();
  } catch (...) {
    ticket->fail(std::current_exception());
  }
  return ticket;
}

// Rows that the cache or memory has are delivered here; the others become reads.
void Engram::prepare(const Ticket& ticket, bool inside_pool) {
  try {
    ticket->sort();
    const auto& wanted = ticket->wanted();
    unique_.fetch_add(static_cast<int64_t>(wanted.size()), std::memory_order_relaxed);
    const EngramTable& table = *tables_[static_cast<size_t>(ticket->table())];
    if (!wanted.empty()) {
      table.check_row(wanted.front().row);
      table.check_row(wanted.back().row);
    }
    std::vector<int32_t> missing;
    look_up(ticket, missing);
    // In memory every copy is its own; from disk, neighbours come together.
    const int64_t size = table.row_bytes();
    if (table.in_memory())
      ticket->join(missing, 0, 1, false);
    else
      ticket->join(missing, std::max<int64_t>(1, kGapBytes / size), std::max<int64_t>(1, kSpanBytes / size),
                   table.split());
    const int64_t n = static_cast<int64_t>(ticket->spans().size()) * (table.split() ? 2 : 1);
    if (n == 0) return ticket->finish();
    const auto part = [this, ticket](int64_t i, ReadBuffer& buffer) {
      read_part(*ticket, static_cast<size_t>(i), buffer);
    };
    if (table.in_memory() && !inside_pool) {
      thread_local ReadBuffer buffer;
      for (int64_t i = 0; i < n; ++i) part(i, buffer);
      return;
    }
    pool_.submit(ticket.get(), ticket->urgency, n, spread(), part);
  } catch (...) {
    ticket->fail(std::current_exception());
  }
}

void Engram::look_up(const Ticket& ticket, std::vector<int32_t>& missing) {
  const auto& wanted = ticket->wanted();
  std::vector<uint8_t> row(static_cast<size_t>(table(ticket->table()).row_bytes()));
  missing.reserve(wanted.size());
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (cache_.get(key_of(ticket->table(), wanted[i].row), row.data()))
      ticket->deliver(wanted[i], row.data());
    else
      missing.push_back(static_cast<int32_t>(i));
  }
  hits_.fetch_add(static_cast<int64_t>(wanted.size() - missing.size()), std::memory_order_relaxed);
}

// One read: a span, or half of it.
void Engram::read_part(Request& request, size_t part, ReadBuffer& buffer) {
  if (request.stopped()) return;
  try {
    const EngramTable& table = *tables_[static_cast<size_t>(request.table())];
    const size_t index = table.split() ? part / 2 : part;
    const Span& span = request.spans()[index];
    const int64_t first = request.wanted()[static_cast<size_t>(span.first)].row;
    const int n = static_cast<int>(request.wanted()[static_cast<size_t>(span.last - 1)].row - first + 1);
    const size_t bytes = static_cast<size_t>(n) * static_cast<size_t>(table.row_bytes());
    thread_local ReadBuffer rows;
    const auto begin = std::chrono::steady_clock::now();
    uint8_t* halves = table.split() ? request.halves(index, bytes) : nullptr;
    const int64_t from_disk =
        table.split() ? table.read_half(*reader_, buffer, static_cast<int>(part % 2), first, n, halves)
                      : table.read(*reader_, buffer, first, n, rows.need(bytes));
    if (from_disk > 0) count_read(request, from_disk, (std::chrono::steady_clock::now() - begin).count());
    if (table.split()) {
      if (!request.half_done(index)) return;
      table.join_halves(n, halves, rows.need(bytes));
      request.drop_halves(index);
    }
    accept(request, span, rows.need(bytes));
  } catch (const Error&) {
    request.fail(std::current_exception());
  } catch (const std::exception& e) {
    request.fail(std::make_exception_ptr(
        EngramError("[engram] a reading thread failed on " + table(request.table()).path() + ": " + e.what())));
  }
}

// The rows of a span, from its first on: checked, kept, delivered.
void Engram::accept(Request& request, const Span& span, const uint8_t* rows) {
  const EngramTable& table = *tables_[static_cast<size_t>(request.table())];
  const auto& wanted = request.wanted();
  const int64_t first = wanted[static_cast<size_t>(span.first)].row;
  for (int32_t i = span.first; i < span.last; ++i) {
    const Wanted& w = wanted[static_cast<size_t>(i)];
    const uint8_t* row = rows + (w.row - first) * table.row_bytes();
    table.check_values(w.row, row);
    cache_.put(key_of(request.table(), w.row), row);
    request.deliver(w, row);
  }
  request.span_done();
}

// A slow disk wants a thread for every read, all at once: 48 reads of a token on 16 threads would be three times its
// latency. What comes from the system's cache in microseconds wants few threads, because it costs processor time. The
// mean decides: where one read in twenty comes from the disk, a thread with 16 of them would often wait for it twice.
ReadPool::Spread Engram::spread() const {
  const auto grain = static_cast<int64_t>(kWorthAThreadUs / mean_read_us_.load(std::memory_order_relaxed));
  const int cores = std::max(2, static_cast<int>(std::thread::hardware_concurrency()));
  if (grain >= kMostGrain) return {kMostGrain, cores};
  if (grain <= 1) return {1, options_.threads};
  return {grain, std::max(cores, options_.threads / static_cast<int>(grain))};  // no more than a step has use for
}

void Engram::count_read(Request& request, int64_t bytes, int64_t nanoseconds) {
  request.count_disk_bytes(bytes);
  reads_.fetch_add(1, std::memory_order_relaxed);
  bytes_.fetch_add(bytes, std::memory_order_relaxed);
  read_ns_.fetch_add(nanoseconds, std::memory_order_relaxed);
  const double us = std::max(1.0, static_cast<double>(nanoseconds) * 1e-3);
  const int bucket = std::min(95, static_cast<int>(4.0 * std::log2(us)) + 1);
  latency_[static_cast<size_t>(bucket)].fetch_add(1, std::memory_order_relaxed);
  // Threads that overwrite each other's step do no harm.
  const float mean = mean_read_us_.load(std::memory_order_relaxed);
  mean_read_us_.store(mean + (std::min(static_cast<float>(us), kMostReadUs) - mean) * kReadMemory,
                      std::memory_order_relaxed);
}

void Engram::promote(const Ticket& ticket, Urgency urgency) {
  ticket->urgency = urgency;
  if (!ticket->done()) pool_.promote(ticket.get(), urgency);
}

void Engram::abandon(const Ticket& ticket) {
  if (ticket->forked()) return;  // nobody writes, and a copy that was under way at the fork never ends
  ticket->abandon();
  pool_.drop(ticket.get());
}

EngramCounters Engram::counters() const {
  EngramCounters c{rows_.load(), unique_.load(), hits_.load(), reads_.load(), bytes_.load(),
                   static_cast<double>(read_ns_.load()) * 1e-9, {}};
  for (size_t i = 0; i < c.latency.size(); ++i) c.latency[i] = latency_[i].load();
  return c;
}

}  // namespace ds4
