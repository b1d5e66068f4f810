#include "engine/engram_feed.h"

#include <algorithm>

namespace ds4 {

namespace {

constexpr int64_t kStep = 16;             // tokens of a run that is a decode step or a verification, not a chunk
constexpr int64_t kRequestBytes = 48;     // of a request beside the row itself: numbers, places, order, spans
constexpr size_t kSmall = size_t{1} << 20;  // bytes that a buffer may keep for nothing

}  // namespace

EngramFeed::~EngramFeed() {
  abandon();
  for (auto* slots : {&now_, &next_})
    for (Slot& slot : *slots) backend_.free(slot.data, slot.bytes);
}

void EngramFeed::release(Slot& slot) {
  if (slot.ticket != nullptr) model_.engram->abandon(slot.ticket);
  // After it, so that nobody writes what the device reads now. (In a child of fork() no device waits.)
  if (slot.latch != nullptr && !slot.ticket->forked()) slot.latch->open();
  slot.latch = nullptr;
  slot.ticket.reset();
}

void EngramFeed::abandon() {
  for (auto* slots : {&now_, &next_})
    for (Slot& slot : *slots) release(slot);
}

// Grows for a long prefill, and shrinks after it.
void EngramFeed::reserve(Slot& slot, size_t bytes) {
  release(slot);
  if (bytes <= slot.bytes && slot.bytes <= std::max(kSmall, 8 * bytes)) return;
  backend_.free(slot.data, slot.bytes);
  slot.data = nullptr;
  slot.bytes = 0;
  if (bytes == 0) return;
  slot.data = static_cast<uint8_t*>(backend_.alloc_for_host(bytes));
  slot.bytes = bytes;
}

void EngramFeed::ask(int table, std::vector<int64_t> rows, Slot& slot, Urgency urgency) {
  reserve(slot, rows.size() * static_cast<size_t>(model_.shape.engram_row_bytes()));
  slot.ticket = model_.engram->request(table, std::move(rows), slot.data, urgency);
}

void EngramFeed::begin(const int32_t* line, int64_t history, int64_t n, int64_t n_ahead) {
  if (model_.engram == nullptr) return;
  const int n_tables = model_.engram->n_tables();
  now_.resize(static_cast<size_t>(n_tables));
  next_.resize(static_cast<size_t>(n_tables));
  const size_t columns = static_cast<size_t>(model_.hash.columns());
  step_ = n <= kStep;
  const Urgency urgency = step_ ? Urgency::step : Urgency::chunk;
  ++counters_.runs;
  for (int t = 0; t < n_tables; ++t) {
    Slot &now = now_[static_cast<size_t>(t)], &next = next_[static_cast<size_t>(t)];
    std::vector<int64_t> rows(static_cast<size_t>(n) * columns);
    model_.hash.rows(t, line, history, n, nullptr, rows.data());
    if (next.ticket != nullptr && !next.ticket->forked() && next.ticket->rows() == rows) {
      std::swap(now, next);
      model_.engram->promote(now.ticket, urgency);
      ++counters_.expected;
    } else {
      release(next);
      ask(t, std::move(rows), now, urgency);
    }
  }
  for (int t = 0; t < n_tables; ++t) {
    Slot& next = next_[static_cast<size_t>(t)];
    std::vector<int64_t> rows(static_cast<size_t>(n_ahead) * columns);
    model_.hash.rows(t, line, history + n, n_ahead, nullptr, rows.data());
    if (n_ahead > 0)
      ask(t, std::move(rows), next, Urgency::ahead);
    else
      reserve(next, 0);
  }
}

// A chunk is issued in parts that are waited for anyhow, and asks the poll between them: there the host waits.
FedRows EngramFeed::take(int table, bool behind, Poll* poll) {
  Slot& slot = now_[static_cast<size_t>(table)];
  if (behind && step_ && !slot.ticket->done()) slot.latch = backend_.latch();
  if (slot.latch != nullptr) {
    slot.ticket->when_done([latch = slot.latch] { latch->open(); });
    ++counters_.joined;
    return {slot.data, 0, 0, 0};
  }
  const double waited = slot.ticket->wait(poll);
  counters_.wait_seconds += waited;
  return {slot.data, waited, std::max(0.0, slot.ticket->seconds() - waited), slot.ticket->disk_bytes()};
}

void EngramFeed::settle(Poll* poll) {
  for (Slot& slot : now_) {
    if (slot.latch == nullptr) continue;
    counters_.wait_seconds += slot.ticket->wait(poll);
    slot.ticket->when_done(nullptr);  // the thread that opens the latch is through with it
    slot.latch->open();               // it did, unless it comes later than this
    slot.latch = nullptr;
  }
}

size_t EngramFeed::bytes() const {
  size_t sum = 0;
  for (const auto* slots : {&now_, &next_})
    for (const Slot& slot : *slots) sum += slot.bytes;
  return sum;
}

int64_t feed_bytes(const Shape& shape, int64_t n) {
  int tables = 0;
  for (const int i : shape.engram_index) tables = std::max(tables, i + 1);
  return 2 * tables * n * shape.engram_columns * (shape.engram_row_bytes() + kRequestBytes);
}

}  // namespace ds4
