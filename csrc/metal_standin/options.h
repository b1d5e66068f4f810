// How the stand-in runs what the host submits, and what it counted. One setting for the process: tests change it.
#pragma once

#include <cstdint>
#include <string>

#include "metal_standin/launch.h"

namespace ds4::standin {

struct Options {
  Order order = Order::forward;  // also the order of dispatches that a concurrent encoder leaves open
  bool checked = false;          // every access watched; one thread
  bool execute = true;           // false: encode, validate and count only
  double patience = 300;         // seconds after which a wait for an event that nobody signals is reported; a device has none
};
Options options();  // from DS4_STANDIN_ORDER and DS4_STANDIN_CHECKED until set
void set_options(const Options& options);

struct Counters {
  uint64_t command_buffers = 0, encoders = 0, dispatches = 0, barriers = 0, host_waits = 0, event_waits = 0,
           event_signals = 0, threads = 0;
  uint64_t steps = 0;           // runs of dispatches that must wait for the run before: the serial critical path
  uint64_t unseen_errors = 0;   // command buffers that failed and whose status nobody asked for
};
Counters counters(bool reset);
void count(uint64_t Counters::* what, uint64_t n = 1);

}  // namespace ds4::standin
