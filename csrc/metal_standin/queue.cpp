// Command queues, command buffers and events: who runs when.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/error.h"
#include "metal_standin/objects.h"
#include "metal_standin/shadow.h"

namespace ds4::standin {

namespace {
std::mutex g_mutex;
void check(const Options& o) {  // or the fast build would run in its place, and find nothing
  if (o.checked && !has_checked())
    throw OptionError("[stand-in] this build has no checked kernels (a sanitizer takes their place); use checked=False");
}
Options& present_options() {  // made at the first use: a bad variable is an error of the caller, not of loading the library
  static Options options = [] {
    Options o;
    if (const char* order = std::getenv("DS4_STANDIN_ORDER")) o.order = parse_order(order);
    if (const char* checked = std::getenv("DS4_STANDIN_CHECKED")) {
      o.checked = std::strcmp(checked, "1") == 0;
      if (!o.checked && std::strcmp(checked, "0") != 0)
        throw OptionError("[stand-in] DS4_STANDIN_CHECKED: expected 0 or 1, found '" + std::string(checked) + "'");
    }
    check(o);
    return o;
  }();
  return options;
}
Counters g_counters;
}  // namespace

Options options() {
  std::lock_guard<std::mutex> lock(g_mutex);
  return present_options();
}
void set_options(const Options& options) {
  check(options);
  std::lock_guard<std::mutex> lock(g_mutex);
  present_options() = options;
}
Counters counters(bool reset) {
  std::lock_guard<std::mutex> lock(g_mutex);
  const Counters now = g_counters;
  if (reset) g_counters = Counters();
  return now;
}
void count(uint64_t Counters::* what, uint64_t n) {
  std::lock_guard<std::mutex> lock(g_mutex);
  g_counters.*what += n;
}

}  // namespace ds4::standin

namespace MTL {

using namespace ds4::standin;

namespace {
double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
std::atomic<uint64_t> g_serial{0};
std::atomic<uint32_t> g_phase{1};
}  // namespace

// ---------------------------------------------------------------- events

SharedEvent::SharedEvent() : state_(std::make_shared<State>()) {}

uint64_t SharedEvent::signaledValue() {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->value;
}
void SharedEvent::setSignaledValue(uint64_t value) {
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->value = value;
  }
  state_->changed.notify_all();
}
bool SharedEvent::waitUntilSignaledValue(uint64_t value, uint64_t milliseconds) {
  count(&Counters::host_waits);
  std::unique_lock<std::mutex> lock(state_->mutex);
  const auto limit = std::chrono::milliseconds(std::min<uint64_t>(milliseconds, 1u << 30));
  return state_->changed.wait_for(lock, limit, [&] { return state_->value >= value; });
}

// ---------------------------------------------------------------- queues

CommandQueue::CommandQueue(NS::UInteger) : state_(std::make_shared<State>()) {
  state_->owner = getpid();
  state_->thread = std::thread([state = state_] { state->work(); });
}

CommandQueue::~CommandQueue() {  // what was committed still runs; its thread ends afterwards
  if (getpid() != state_->owner) {  // a forked child has no such thread, and its locks may be held for ever
    new std::shared_ptr<State>(state_);
    return;
  }
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->quit = true;
  }
  state_->changed.notify_all();
  if (state_->thread.get_id() == std::this_thread::get_id()) state_->thread.detach();
  else state_->thread.join();
}

Device* CommandQueue::device() const { return CreateSystemDefaultDevice()->autorelease(); }
void CommandQueue::addResidencySet(const ResidencySet*) {}
void CommandQueue::removeResidencySet(const ResidencySet*) {}

namespace {
CommandBuffer* make_buffer(const std::shared_ptr<CommandQueue::State>& queue, bool retains) {
  auto state = std::make_unique<CommandBuffer::State>();
  state->queue = queue;
  state->retains = retains;
  return (new CommandBuffer(std::move(state)))->autorelease();
}
}  // namespace

CommandBuffer* CommandQueue::commandBuffer() { return make_buffer(state_, true); }
CommandBuffer* CommandQueue::commandBufferWithUnretainedReferences() { return make_buffer(state_, false); }

void CommandQueue::State::work() {
  for (;;) {
    CommandBuffer* buffer;
    {
      std::unique_lock<std::mutex> lock(mutex);
      const auto ready = [&] { return !waiting.empty() && waiting.front()->state().status >= CommandBufferStatusCommitted; };
      changed.wait(lock, [&] { return ready() || (quit && waiting.empty()); });
      if (waiting.empty()) return;
      buffer = waiting.front();
      waiting.pop_front();
    }
    run(buffer);
    buffer->release();
  }
}

namespace {

// Dispatches that may run in any order are put into the order under test.
void arrange(std::vector<Command>& commands, Order order) {
  for (size_t i = 0; i < commands.size();) {
    size_t j = i + 1;
    while (j < commands.size() && commands[i].kind == Command::Kind::dispatch && commands[j].kind == Command::Kind::dispatch &&
           commands[i].movable && commands[j].movable && commands[i].phase == commands[j].phase)
      ++j;
    if (order == Order::reverse) std::reverse(commands.begin() + static_cast<long>(i), commands.begin() + static_cast<long>(j));
    if (order == Order::shuffled) std::rotate(commands.begin() + static_cast<long>(i), commands.begin() + static_cast<long>((i + j) / 2), commands.begin() + static_cast<long>(j));
    i = j;
  }
}

void count_steps(const std::vector<Command>& commands) {
  uint32_t last = 0;
  for (const Command& c : commands) {
    if (c.kind != Command::Kind::dispatch) continue;
    count(&Counters::threads, c.launch.grid.count());
    if (c.phase != last) count(&Counters::steps);
    last = c.phase;
  }
}

bool read_indirect(Command& c, Report& report) {
  uint32_t n[3];
  std::memcpy(n, static_cast<const char*>(const_cast<Buffer*>(c.indirect)->contents()) + c.indirect_offset, sizeof n);
  Launch& l = c.launch;
  l.groups = {n[0], n[1], n[2]};
  if (l.groups.count() == 0) return false;  // nothing to do
  if (l.groups.count() > (1u << 30)) {
    report.add("kernel " + std::string(l.kernel->name) + ": indirect threadgroup counts " + std::to_string(n[0]) + ", " +
               std::to_string(n[1]) + ", " + std::to_string(n[2]) + " make no sense");
    return false;
  }
  l.grid = {n[0] * l.group_size.x, n[1] * l.group_size.y, n[2] * l.group_size.z};
  return true;
}

void mark_phases(std::vector<Command>& commands) {
  for (size_t i = 0; i < commands.size();) {  // phases only rise
    std::vector<Launch*> launches;
    const uint32_t phase = commands[i].phase;
    for (; i < commands.size() && commands[i].phase == phase; ++i)
      if (commands[i].kind == Command::Kind::dispatch) launches.push_back(&commands[i].launch);
    mark_watched(launches);
  }
}

void run_commands(CommandBuffer::State& s, const Options& o) {
  std::unique_ptr<Shadow> shadow = o.checked ? std::make_unique<Shadow>() : nullptr;
  if (shadow) mark_phases(s.commands);
  const uint32_t first_phase = g_phase.fetch_add(s.phases + 1);
  for (Command& c : s.commands) {
    if (c.kind == Command::Kind::wait) {
      std::unique_lock<std::mutex> lock(c.event->mutex);
      const std::chrono::duration<double> patience(o.patience);
      if (!c.event->changed.wait_for(lock, patience, [&] { return c.event->value >= c.value; }))
        s.report.add("command buffer: a shared event did not reach " + std::to_string(c.value) + " within " +
                     std::to_string(o.patience) + " seconds, it is at " + std::to_string(c.event->value));
    } else if (c.kind == Command::Kind::signal) {
      {
        std::lock_guard<std::mutex> lock(c.event->mutex);
        c.event->value = std::max(c.event->value, c.value);
      }
      c.event->changed.notify_all();
    } else if (s.report.empty() && o.execute) {
      if (c.indirect != nullptr && !read_indirect(c, s.report)) continue;
      c.launch.order = o.order;
      c.launch.serial = ++g_serial;
      for (Binding& b : c.launch.buffers) b.phase += first_phase;  // phases of two command buffers differ
      execute(c.launch, shadow.get(), s.report);
    }
  }
}

}  // namespace

void CommandQueue::State::run(CommandBuffer* buffer) {
  CommandBuffer::State& s = buffer->state();
  const Options o = options();
  for (const HandlerFunction& handler : s.scheduled) handler(buffer);
  s.set_status(CommandBufferStatusScheduled);
  s.start = now();
  count_steps(s.commands);
  if (o.order != Order::forward) arrange(s.commands, o.order);
  try {
    run_commands(s, o);
  } catch (const std::exception& e) {
    s.report.add(e.what());
  }
  s.end = now();
  if (!s.retains)
    for (const auto& b : s.buffers)
      if (static_cast<size_t>(std::count_if(s.buffers.begin(), s.buffers.end(), [&](const auto& x) { return x.get() == b.get(); })) == b->retainCount()) {
        s.report.add("command buffer without retained references: a buffer was released before it completed");
        break;
      }
  s.buffers.clear();
  if (!s.report.empty()) s.error = new NS::Error("[stand-in] " + s.report.text());
  // Metal reports completion first and waits for the handlers before waitUntilCompleted returns.
  const CommandBufferStatus last = s.error != nullptr ? CommandBufferStatusError : CommandBufferStatusCompleted;
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    s.status = last;
  }
  for (const HandlerFunction& handler : s.completed) handler(buffer);
  s.set_done();
}

// ---------------------------------------------------------------- command buffers

void CommandBuffer::State::set_status(CommandBufferStatus next) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    status = next;
  }
  changed.notify_all();
}
void CommandBuffer::State::set_done() {
  {
    std::lock_guard<std::mutex> lock(mutex);
    done = true;
  }
  changed.notify_all();
}

CommandBuffer::CommandBuffer(std::unique_ptr<State> state) : state_(std::move(state)) {}
CommandBuffer::~CommandBuffer() {
  if (state_->error == nullptr) return;
  if (!state_->seen) {
    count(&Counters::unseen_errors);
    std::fprintf(stderr, "[stand-in] a command buffer failed and nobody asked: %s\n", state_->error->localizedDescription()->utf8String());
  }
  state_->error->release();
}

void CommandBuffer::encodeWait(const Event* event, uint64_t value) {
  Command c;
  c.kind = Command::Kind::wait;
  c.event = static_cast<const SharedEvent*>(event)->state();
  c.value = value;
  count(&Counters::event_waits);
  if (state_->encoding) state_->report.add("command buffer: encodeWait while an encoder is open");
  state_->commands.push_back(std::move(c));
}

void CommandBuffer::encodeSignalEvent(const Event* event, uint64_t value) {
  Command c;
  c.kind = Command::Kind::signal;
  c.event = static_cast<const SharedEvent*>(event)->state();
  c.value = value;
  count(&Counters::event_signals);
  if (state_->encoding) state_->report.add("command buffer: encodeSignalEvent while an encoder is open");
  state_->commands.push_back(std::move(c));
}

void CommandBuffer::useResidencySet(const ResidencySet*) {}
void CommandBuffer::addScheduledHandler(const HandlerFunction& function) { state_->scheduled.push_back(function); }
void CommandBuffer::addCompletedHandler(const HandlerFunction& function) {
  if (state_->status >= CommandBufferStatusCommitted) return state_->report.add("command buffer: a completion handler after commit");
  state_->completed.push_back(function);
}

void CommandBuffer::enqueue() {
  CommandQueue::State& q = *state_->queue;
  std::lock_guard<std::mutex> lock(q.mutex);
  if (state_->status != CommandBufferStatusNotEnqueued) return;
  state_->status = CommandBufferStatusEnqueued;
  q.waiting.push_back(retain());
}

void CommandBuffer::commit() {
  if (state_->status >= CommandBufferStatusCommitted) return state_->report.add("command buffer: commit twice");
  if (state_->encoding) state_->report.add("command buffer: commit before endEncoding");
  count(&Counters::command_buffers);
  enqueue();
  CommandQueue::State& q = *state_->queue;
  {
    std::lock_guard<std::mutex> lock(q.mutex);
    state_->status = CommandBufferStatusCommitted;
  }
  q.changed.notify_all();
}

void CommandBuffer::waitUntilScheduled() {
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->changed.wait(lock, [&] { return state_->status >= CommandBufferStatusScheduled; });
}
void CommandBuffer::waitUntilCompleted() {
  count(&Counters::host_waits);
  std::unique_lock<std::mutex> lock(state_->mutex);
  if (state_->status < CommandBufferStatusCommitted) return;  // Metal would wait for ever
  state_->changed.wait(lock, [&] { return state_->done; });
}

CommandBufferStatus CommandBuffer::status() const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->seen = true;
  return state_->status;
}
NS::Error* CommandBuffer::error() const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->seen = true;
  return state_->error;
}
double CommandBuffer::GPUStartTime() const { return state_->start; }
double CommandBuffer::GPUEndTime() const { return state_->end; }
void CommandBuffer::setLabel(const NS::String* label) { state_->label = NS::RetainPtr(const_cast<NS::String*>(label)); }
NS::String* CommandBuffer::label() const { return state_->label.get(); }

}  // namespace MTL
