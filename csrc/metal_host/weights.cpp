#include "metal_host/weights.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>

#include "base/error.h"

namespace ds4::metal {

namespace {

constexpr uintptr_t kPage = 16384;

struct Span {
  const uint8_t* p;
  size_t bytes;
  const uint8_t* end() const { return p + bytes; }
};

int64_t scale_bytes(const Matrix& m) {
  if (m.scale == nullptr) return 0;
  return m.scale_row_bytes * (m.type == RowType::fp8_block ? (m.rows + 31) / 32 : m.rows);
}

void add(std::vector<Span>& spans, const Matrix& m) {
  if (m.empty()) return;
  spans.push_back({m.data, static_cast<size_t>(m.row_bytes * m.rows)});
  if (m.scale != nullptr) spans.push_back({m.scale, static_cast<size_t>(scale_bytes(m))});
}

using Member = Matrix ExpertWeights::*;
constexpr Member kMembers[3] = {&ExpertWeights::w1, &ExpertWeights::w2, &ExpertWeights::w3};

// The matrices of all experts as one span, when they follow each other in memory.
void add_experts(std::vector<Span>& spans, const MoeWeights& w, Member member) {
  std::vector<Span> one;
  for (const ExpertWeights& e : w.experts) add(one, e.*member);
  std::sort(one.begin(), one.end(), [](const Span& a, const Span& b) { return a.p < b.p; });
  for (const Span& s : one)
    if (!spans.empty() && &s != one.data() && spans.back().end() == s.p)
      spans.back().bytes += s.bytes;
    else
      spans.push_back(s);
}

void add_layer(std::vector<Span>& spans, const LayerWeights& w) {
  for (const Matrix* m : {&w.hc_attn.fn, &w.hc_ffn.fn, &w.attn.wq_a, &w.attn.wq_b, &w.attn.wkv, &w.attn.wo_a, &w.attn.wo_b,
                          &w.compressor.wkv, &w.compressor.wgate, &w.compressor.index_k, &w.indexer.wq_b, &w.indexer.weights_proj,
                          &w.engram.wkv, &w.moe.gate, &w.moe.shared.w1, &w.moe.shared.w2, &w.moe.shared.w3})
    add(spans, *m);
  for (const Member member : kMembers) add_experts(spans, w.moe, member);
}

// What adopt() returns: buffers, and what was remembered for them.
class Adopted {
 public:
  ~Adopted();
  void wrap(std::vector<Span> spans);
  void copy(const std::vector<std::vector<float>>& vectors);
  void experts(const MoeWeights& w);
  void keep_resident();

 private:
  std::vector<Ref<MTL::Buffer>> buffers_;
  std::set<MTL::Buffer*> known_;  // in which others hold weights
  std::vector<const void*> remembered_;
  std::vector<const MoeWeights*> tables_;
  Ref<MTL::ResidencySet> resident_;
};

std::mutex tables_mutex;
std::map<const MoeWeights*, std::shared_ptr<const ExpertTable>>& tables() {
  static auto* all = new std::map<const MoeWeights*, std::shared_ptr<const ExpertTable>>;
  return *all;
}

Adopted::~Adopted() {
  if (resident_) {
    Device::get().remove_resident(resident_.get());
    resident_->endResidency();
  }
  for (const void* p : remembered_) Device::get().forget(p);
  const std::lock_guard<std::mutex> lock(tables_mutex);
  for (const MoeWeights* w : tables_) tables().erase(w);
}

uintptr_t page_down(const void* p) { return reinterpret_cast<uintptr_t>(p) & ~(kPage - 1); }
uintptr_t page_up(const void* p) { return (reinterpret_cast<uintptr_t>(p) + kPage - 1) & ~(kPage - 1); }

// Neighbours share a buffer as long as the device takes one of that length; a span is never cut.
void Adopted::wrap(std::vector<Span> spans) {
  Device& device = Device::get();
  std::erase_if(spans, [&](const Span& s) {  // made by the device itself (make_memory), or adopted with another model
    Place known;
    if (s.bytes == 0 || !device.find(s.p, &known)) return false;
    known_.insert(known.buffer);
    return true;
  });
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.p < b.p; });
  const size_t most = device.device()->maxBufferLength();
  for (size_t i = 0; i < spans.size();) {
    const uintptr_t begin = page_down(spans[i].p);
    uintptr_t end = page_up(spans[i].end());
    if (end - begin > most)
      throw MemoryPlanError("[metal] a tensor of " + std::to_string(spans[i].bytes) + " bytes is larger than the device's largest buffer, " +
                            std::to_string(most) + " bytes; use backend=\"cpu\"");
    size_t j = i + 1;
    while (j < spans.size() && page_down(spans[j].p) <= end && std::max(end, page_up(spans[j].end())) - begin <= most)
      end = std::max(end, page_up(spans[j++].end()));
    buffers_.push_back(device.wrap(reinterpret_cast<const void*>(begin), end - begin));
    for (; i < j; ++i) {
      Place known;
      if (spans[i].bytes == 0 || device.find(spans[i].p, &known)) continue;
      device.remember(spans[i].p, spans[i].bytes, buffers_.back().get(), reinterpret_cast<uintptr_t>(spans[i].p) - begin);
      remembered_.push_back(spans[i].p);
    }
  }
}

// One residency set for all weights, so that no command buffer has to ask for them again.
void Adopted::keep_resident() {
  const Pool pool;
  Device& device = Device::get();
  const Ref<MTL::ResidencySetDescriptor> descriptor(MTL::ResidencySetDescriptor::alloc()->init());
  NS::Error* error = nullptr;
  resident_ = Ref<MTL::ResidencySet>(device.device()->newResidencySet(descriptor.get(), &error));
  if (!resident_) throw BackendError("[metal] the device gave no residency set: " + text(error));
  for (const auto& buffer : buffers_) resident_->addAllocation(buffer.get());
  for (MTL::Buffer* buffer : known_) resident_->addAllocation(buffer);
  resident_->commit();
  resident_->requestResidency();
  device.add_resident(resident_.get());
}

// Short vectors (norms, biases, sinks) were expanded when the model was opened; they are copied once more.
void Adopted::copy(const std::vector<std::vector<float>>& vectors) {
  Device& device = Device::get();
  size_t total = 0;
  for (const auto& v : vectors) total += (v.size() * sizeof(float) + 255) & ~size_t{255};
  if (total == 0) return;
  buffers_.push_back(device.new_buffer(total));
  auto* at = static_cast<uint8_t*>(buffers_.back()->contents());
  size_t offset = 0;
  for (const auto& v : vectors) {
    std::memcpy(at + offset, v.data(), v.size() * sizeof(float));
    device.remember(v.data(), v.size() * sizeof(float), buffers_.back().get(), offset);
    remembered_.push_back(v.data());
    offset += (v.size() * sizeof(float) + 255) & ~size_t{255};
  }
}

// One part (data or scales) of one matrix of all experts: in place where all lie in one buffer, else copied together.
Place gather(const std::vector<Span>& parts, std::vector<uint64_t>& offsets, size_t which, std::vector<Ref<MTL::Buffer>>& owned) {
  Device& device = Device::get();
  std::vector<Place> places(parts.size());
  bool together = true;
  for (size_t e = 0; e < parts.size(); ++e)
    together = together && device.find(parts[e].p, &places[e]) && places[e].buffer == places[0].buffer;
  if (together) {
    size_t low = places[0].offset;
    for (const Place& p : places) low = std::min(low, p.offset);
    for (size_t e = 0; e < parts.size(); ++e) offsets[2 * e + which] = places[e].offset - low;
    return {places[0].buffer, low};
  }
  size_t total = 0;
  for (const Span& s : parts) total += (s.bytes + 15) & ~size_t{15};
  owned.push_back(device.new_buffer(total));
  auto* at = static_cast<uint8_t*>(owned.back()->contents());
  size_t offset = 0;
  for (size_t e = 0; e < parts.size(); ++e) {
    std::memcpy(at + offset, parts[e].p, parts[e].bytes);
    offsets[2 * e + which] = offset;
    offset += (parts[e].bytes + 15) & ~size_t{15};
  }
  return {owned.back().get(), 0};
}

ExpertMatrices table_of(const MoeWeights& w, Member member, std::vector<Ref<MTL::Buffer>>& owned) {
  const Matrix& first = w.experts.at(0).*member;
  ExpertMatrices t{first.type, first.rows, first.cols, first.row_bytes, first.scale_row_bytes, {}, {}, {}, true};
  std::vector<Span> data, scales;
  for (const ExpertWeights& e : w.experts) {
    const Matrix& m = e.*member;
    if (m.type != first.type || m.rows != first.rows || m.cols != first.cols)
      throw BackendError("[metal] the experts of a layer are stored in different formats; use backend=\"cpu\"");
    data.push_back({m.data, static_cast<size_t>(m.row_bytes * m.rows)});
    scales.push_back({m.scale, static_cast<size_t>(scale_bytes(m))});
  }
  std::vector<uint64_t> offsets(2 * w.experts.size(), 0);
  t.data = gather(data, offsets, 0, owned);
  for (size_t e = 0; e < data.size(); ++e) t.aligned = t.aligned && (t.data.offset + offsets[2 * e]) % 16 == 0;
  t.scale = first.scale != nullptr ? gather(scales, offsets, 1, owned) : t.data;
  owned.push_back(Device::get().new_buffer(offsets.size() * sizeof(uint64_t)));
  std::memcpy(owned.back()->contents(), offsets.data(), offsets.size() * sizeof(uint64_t));
  t.offsets = {owned.back().get(), 0};
  return t;
}

std::shared_ptr<const ExpertTable> make_table(const MoeWeights& w) {
  auto table = std::make_shared<ExpertTable>();
  table->w1 = table_of(w, kMembers[0], table->owned);
  table->w2 = table_of(w, kMembers[1], table->owned);
  table->w3 = table_of(w, kMembers[2], table->owned);
  if (table->w1.type != table->w3.type || w.shared.w1.type != w.shared.w3.type)
    throw BackendError("[metal] gate and up matrices of the experts are stored in different formats; use backend=\"cpu\"");
  return table;
}

void Adopted::experts(const MoeWeights& w) {
  if (w.experts.empty()) return;
  auto table = make_table(w);
  const std::lock_guard<std::mutex> lock(tables_mutex);
  tables()[&w] = std::move(table);
  tables_.push_back(&w);
}

}  // namespace

std::shared_ptr<const ExpertTable> expert_table(const MoeWeights& weights) {
  {
    const std::lock_guard<std::mutex> lock(tables_mutex);
    const auto found = tables().find(&weights);
    if (found != tables().end()) return found->second;
  }
  return make_table(weights);
}

std::shared_ptr<void> adopt(const Weights& w, const std::vector<std::vector<float>>& vectors) {
  auto adopted = std::make_shared<Adopted>();
  std::vector<Span> spans;
  add(spans, w.embed);
  add(spans, w.head);
  for (const LayerWeights& l : w.layers) add_layer(spans, l);
  adopted->wrap(std::move(spans));
  adopted->copy(vectors);
  for (const LayerWeights& l : w.layers) adopted->experts(l.moe);
  adopted->keep_resident();
  return adopted;
}

std::shared_ptr<void> adopt(const DrafterWeights& w, const std::vector<std::vector<float>>& vectors) {
  auto adopted = std::make_shared<Adopted>();
  std::vector<Span> spans;
  for (const Matrix* m : {&w.main_proj, &w.markov_embed, &w.markov_head, &w.confidence}) add(spans, *m);
  for (const LayerWeights& l : w.stages) add_layer(spans, l);
  adopted->wrap(std::move(spans));
  adopted->copy(vectors);
  for (const LayerWeights& l : w.stages) adopted->experts(l.moe);
  adopted->keep_resident();
  return adopted;
}

}  // namespace ds4::metal
