#include "engine/builder.h"

#include <map>

#include "base/error.h"
#include "engine/rope.h"
#ifdef DS4_METAL
#include "metal_host/metal.h"
#endif

namespace ds4 {

namespace {

struct Format {
  const char* name;
  RowType type;
  int block;        // columns of a block; 1: any number of columns
  int block_bytes;
  bool scaled;      // has separate e8m0 scales, one per 32 columns
};

constexpr Format kFormats[] = {
    {"f32", RowType::f32, 1, 4, false},          {"f16", RowType::f16, 1, 2, false},
    {"bf16", RowType::bf16, 1, 2, false},        {"fp8_block", RowType::fp8_block, 1, 1, true},
    {"fp8_row", RowType::fp8_row, 32, 32, true}, {"fp4_row", RowType::fp4_row, 32, 16, true},
    {"q8_0", RowType::q8_0, 32, 34, false},      {"q4_k", RowType::q4_k, 256, 144, false},
    {"mxfp4", RowType::mxfp4, 32, 17, false},    {"q2_k", RowType::q2_k, 256, 84, false},
    {"iq2_xxs", RowType::iq2_xxs, 256, 66, false},
};

const Format& format_of(RowType type) {
  for (const Format& f : kFormats)
    if (f.type == type) return f;
  throw CheckpointError("[weights] this row format is not supported yet");
}

// What a tensor name may fill. One list, used to set a slot and to find the ones left empty.
struct Slots {
  std::map<std::string, Matrix*> matrices;
  std::map<std::string, const float**> vectors;
  std::map<std::string, int64_t> vector_sizes;
  std::map<std::string, std::pair<int64_t, int64_t>> shapes;

  void matrix(const std::string& name, Matrix& m, int64_t rows, int64_t cols) {
    matrices[name] = &m;
    shapes[name] = {rows, cols};
  }
  void vector(const std::string& name, const float*& v, int64_t n) {
    vectors[name] = &v;
    vector_sizes[name] = n;
  }
};

void hc_slots(Slots& t, const Shape& s, const std::string& p, const char* kind, HcWeights& w) {
  const std::string hc = p + "hc_" + kind;
  t.matrix(hc + "_fn", w.fn, s.mix_rows(), static_cast<int64_t>(s.n_streams) * s.hidden);
  t.vector(hc + "_scale", w.scale, 3);
  t.vector(hc + "_base", w.base, s.mix_rows());
  t.vector(p + kind + "_norm.weight", w.norm, s.hidden);
}

void attention_slots(Slots& t, const Shape& s, const std::string& p, AttentionWeights& w) {
  const int64_t heads = static_cast<int64_t>(s.n_heads) * s.head_dim;
  t.matrix(p + "wq_a.weight", w.wq_a, s.q_rank, s.hidden);
  t.matrix(p + "wq_b.weight", w.wq_b, heads, s.q_rank);
  t.matrix(p + "wkv.weight", w.wkv, s.head_dim, s.hidden);
  t.matrix(p + "wo_a.weight", w.wo_a, static_cast<int64_t>(s.o_groups) * s.o_rank, s.group_dim());
  t.matrix(p + "wo_b.weight", w.wo_b, s.hidden, static_cast<int64_t>(s.o_groups) * s.o_rank);
  t.vector(p + "q_norm.weight", w.q_norm, s.q_rank);
  t.vector(p + "kv_norm.weight", w.kv_norm, s.head_dim);
  t.vector(p + "attn_sink", w.sink, s.n_heads);
}

void index_slots(Slots& t, const Shape& s, int l, const std::string& p, LayerWeights& w) {
  const int source = s.kv_source[l];
  if (source >= 0 && s.source_layer[source] == l) {
    t.matrix(p + "compressor.wkv.weight", w.compressor.wkv, s.head_dim, s.hidden);
    if (s.ratio[l] == 2) t.matrix(p + "compressor.wgate.weight", w.compressor.wgate, s.head_dim, s.hidden);
    t.vector(p + "compressor.norm.weight", w.compressor.norm, s.head_dim);
    t.matrix(p + "indexer.wk.weight", w.compressor.index_k, s.index_dim, s.head_dim);
    t.vector(p + "indexer.k_norm.weight", w.compressor.index_k_norm, s.index_dim);
  }
  if (s.index_source[l] == l) {
    t.matrix(p + "indexer.wq_b.weight", w.indexer.wq_b, static_cast<int64_t>(s.index_heads) * s.index_dim, s.q_rank);
    t.matrix(p + "indexer.weights_proj.weight", w.indexer.weights_proj, s.index_heads, s.hidden);
  }
}

void expert_slots(Slots& t, const Shape& s, const std::string& p, ExpertWeights& w) {
  t.matrix(p + "w1.weight", w.w1, s.expert_dim, s.hidden);
  t.matrix(p + "w2.weight", w.w2, s.hidden, s.expert_dim);
  t.matrix(p + "w3.weight", w.w3, s.expert_dim, s.hidden);
}

void moe_slots(Slots& t, const Shape& s, const std::string& p, MoeWeights& w) {
  t.matrix(p + "gate.weight", w.gate, s.n_experts, s.hidden);
  t.vector(p + "gate.bias", w.bias, s.n_experts);
  for (int e = 0; e < s.n_experts; ++e) expert_slots(t, s, p + "experts." + std::to_string(e) + ".", w.experts[e]);
  expert_slots(t, s, p + "shared_experts.", w.shared);
}

void layer_slots(Slots& t, const Shape& s, int l, LayerWeights& w) {
  const std::string p = "layers." + std::to_string(l) + ".";
  hc_slots(t, s, p, "attn", w.hc_attn);
  hc_slots(t, s, p, "ffn", w.hc_ffn);
  attention_slots(t, s, p + "attn.", w.attn);
  index_slots(t, s, l, p + "attn.", w);
  if (s.engram_index[l] >= 0) {
    const int64_t cd = static_cast<int64_t>(s.n_streams) * s.hidden;
    t.vector(p + "engram.q_weight", w.engram.q_weight, cd);
    t.vector(p + "engram.k_weight", w.engram.k_weight, cd);
    t.matrix(p + "engram.wkv.weight", w.engram.wkv, cd + s.hidden, static_cast<int64_t>(s.engram_columns) * s.engram_dim);
  }
  moe_slots(t, s, p + "ffn.", w.moe);
}

Slots drafter_slots(DrafterModel& model) {
  Slots t;
  const Shape& s = model.shape;
  DrafterWeights& w = model.weights;
  const int rank = model.sizes.markov_rank;
  for (size_t i = 0; i < w.stages.size(); ++i) {
    const std::string p = "mtp." + std::to_string(i) + ".";
    hc_slots(t, s, p, "attn", w.stages[i].hc_attn);
    hc_slots(t, s, p, "ffn", w.stages[i].hc_ffn);
    attention_slots(t, s, p + "attn.", w.stages[i].attn);
    moe_slots(t, s, p + "ffn.", w.stages[i].moe);
  }
  const std::string last = "mtp." + std::to_string(w.stages.size() - 1) + ".";
  t.matrix("mtp.0.main_proj.weight", w.main_proj, s.hidden, model.main_dim());
  t.vector("mtp.0.main_norm.weight", w.main_norm, s.hidden);
  t.vector(last + "norm.weight", w.norm, s.hidden);
  t.matrix(last + "markov_head.embed.weight", w.markov_embed, s.vocab, rank);
  t.matrix(last + "markov_head.head.weight", w.markov_head, s.vocab, rank);
  t.matrix(last + "confidence_head.proj.weight", w.confidence, 1, s.hidden + rank);
  return t;
}

Slots all_slots(Model& model) {
  Slots t;
  const Shape& s = model.shape;
  t.matrix("embed.weight", model.weights.embed, s.vocab, s.hidden);
  t.matrix("head.weight", model.weights.head, s.vocab, s.hidden);
  t.vector("norm.weight", model.weights.norm, s.hidden);
  for (int l = 0; l < s.n_layers; ++l) layer_slots(t, s, l, model.weights.layers[l]);
  return t;
}

std::string pair(int64_t a, int64_t b) { return "[" + std::to_string(a) + ", " + std::to_string(b) + "]"; }

}  // namespace

struct ModelBuilderSlots {
  Slots slots;
};

RowType parse_row_type(const std::string& name) {
  for (const Format& f : kFormats)
    if (name == f.name) return f.type;
  throw CheckpointError("[weights] unknown or unsupported row format '" + name + "'");
}

int64_t row_bytes(RowType type, int64_t cols) {
  const Format& f = format_of(type);
  if (cols % f.block != 0)
    throw CheckpointError("[weights] rows of format " + std::string(f.name) + " have a multiple of " +
                          std::to_string(f.block) + " columns, got " + std::to_string(cols));
  return cols / f.block * f.block_bytes;
}

int64_t scale_row_bytes(RowType type, int64_t cols) { return format_of(type).scaled ? (cols + 31) / 32 : 0; }

ModelBuilder::ModelBuilder(Shape shape, Activations activations) : model_(std::make_shared<Model>()) {
  model_->shape = std::move(shape);
  model_->activations = activations;
  const Shape& s = model_->shape;
  model_->weights.layers.resize(static_cast<size_t>(s.n_layers));
  for (auto& l : model_->weights.layers) l.moe.experts.resize(static_cast<size_t>(s.n_experts));
  slots_ = std::make_shared<ModelBuilderSlots>(ModelBuilderSlots{all_slots(*model_)});
}

namespace {

void set_matrix(const Slots& slots, const std::string& name, const std::string& type, int64_t rows, int64_t cols,
                const uint8_t* data, int64_t n_bytes, const uint8_t* scale, int64_t n_scale_bytes) {
  const auto slot = slots.matrices.find(name);
  if (slot == slots.matrices.end()) throw CheckpointError("[weights] the model has no matrix named " + name);
  const auto [want_rows, want_cols] = slots.shapes.at(name);
  if (rows != want_rows || cols != want_cols)
    throw CheckpointError("[weights] " + name + ": expected shape " + pair(want_rows, want_cols) + ", got " + pair(rows, cols));
  Matrix m;
  m.type = parse_row_type(type);
  m.rows = static_cast<int>(rows);
  m.cols = static_cast<int>(cols);
  m.data = data;
  m.row_bytes = row_bytes(m.type, cols);
  m.scale_row_bytes = scale_row_bytes(m.type, cols);
  m.scale = m.scale_row_bytes > 0 ? scale : nullptr;
  const int64_t scale_rows = m.type == RowType::fp8_block ? (rows + 31) / 32 : rows;
  const int64_t want_scale = m.scale_row_bytes * scale_rows;
  if (n_bytes != rows * m.row_bytes || n_scale_bytes != want_scale)
    throw CheckpointError("[weights] " + name + ": expected " + std::to_string(rows * m.row_bytes) + " bytes and " +
                          std::to_string(want_scale) + " bytes of scales, got " + std::to_string(n_bytes) + " and " +
                          std::to_string(n_scale_bytes));
  *slot->second = m;
}

void set_vector(const Slots& slots, std::vector<std::vector<float>>& owner, const std::string& name, const float* data,
                int64_t n) {
  const auto slot = slots.vectors.find(name);
  if (slot == slots.vectors.end()) throw CheckpointError("[weights] the model has no vector named " + name);
  if (n != slots.vector_sizes.at(name))
    throw CheckpointError("[weights] " + name + ": expected " + std::to_string(slots.vector_sizes.at(name)) +
                          " numbers, got " + std::to_string(n));
  owner.emplace_back(data, data + n);
  *slot->second = owner.back().data();
}

void refuse_missing(const Slots& slots) {
  std::string missing;
  int n = 0;
  const auto add = [&](const std::string& name) {
    if (++n <= 40) missing += "\n  - " + name;
  };
  for (const auto& [name, m] : slots.matrices)
    if (m->empty()) add(name);
  for (const auto& [name, v] : slots.vectors)
    if (*v == nullptr) add(name);
  if (n > 0) throw CheckpointError("[weights] " + std::to_string(n) + " tensors are missing:" + missing);
}

}  // namespace

void ModelBuilder::matrix(const std::string& name, const std::string& type, int64_t rows, int64_t cols,
                          const uint8_t* data, int64_t n_bytes, const uint8_t* scale, int64_t n_scale_bytes) {
  set_matrix(slots_->slots, name, type, rows, cols, data, n_bytes, scale, n_scale_bytes);
}

void ModelBuilder::vector(const std::string& name, const float* data, int64_t n) {
  set_vector(slots_->slots, model_->vectors, name, data, n);
}

void ModelBuilder::hash(EngramHash hash) {
  if (hash.vocab() < model_->shape.vocab)
    throw CheckpointError("[engram] the token map has " + std::to_string(hash.vocab()) + " entries, expected " +
                          std::to_string(model_->shape.vocab));
  if (hash.columns() != model_->shape.engram_columns)
    throw CheckpointError("[engram] the hash has " + std::to_string(hash.columns()) + " columns, expected " +
                          std::to_string(model_->shape.engram_columns));
  model_->hash = std::move(hash);
}

void ModelBuilder::engram(std::shared_ptr<Engram> engram) {
  const int want = model_->shape.engram_row_bytes();
  for (int i = 0; i < engram->n_tables(); ++i)
    if (engram->table(i).row_bytes() != want)
      throw CheckpointError("[engram] rows of " + engram->table(i).path() + ": expected " + std::to_string(want) +
                            " bytes, got " + std::to_string(engram->table(i).row_bytes()));
  model_->engram = std::move(engram);
}

std::shared_ptr<const Model> ModelBuilder::build(const std::string& isa, int threads) {
  refuse_missing(slots_->slots);
  int engrams = 0;
  for (int i : model_->shape.engram_index) engrams = i + 1 > engrams ? i + 1 : engrams;
  const int tables = model_->engram ? model_->engram->n_tables() : 0;
  if (tables != engrams || model_->hash.n_tables() != engrams)
    throw CheckpointError("[engram] expected " + std::to_string(engrams) + " tables with their hashes, got " +
                          std::to_string(tables) + " and " + std::to_string(model_->hash.n_tables()));
  model_->isa = isa;
  model_->pool.reset(new ThreadPool(threads));
  model_->frequencies = rope_frequencies(model_->shape, false);
  model_->yarn_frequencies = rope_frequencies(model_->shape, true);
#ifdef DS4_METAL
  if (isa == metal::kName) model_->adopted = metal::adopt(model_->weights, model_->vectors);
#endif
  model_->make_backend();  // fails here rather than in the first session
  return std::move(model_);
}

DrafterBuilder::DrafterBuilder(std::shared_ptr<const Model> target, DraftSizes sizes, int n_stages, int n_experts, int top_k)
    : model_(std::make_shared<DrafterModel>()) {
  if (n_stages < 1 || sizes.block < 1 || sizes.markov_rank < 1 || sizes.target_layers.empty())
    throw ConfigError("[drafter] expected at least one stage, block row, Markov rank and target layer");
  Shape& s = model_->shape;
  s = target->shape;
  if (sizes.noise < 0 || sizes.noise >= s.vocab) throw ConfigError("[drafter] the noise token is not in the vocabulary");
  for (int l : sizes.target_layers)
    if (l < 0 || l >= s.n_layers) throw ConfigError("[drafter] there is no target layer " + std::to_string(l));
  s.n_experts = n_experts;
  s.top_k = top_k;
  s.n_layers = n_stages;
  s.ratio.assign(static_cast<size_t>(n_stages), 0);
  s.kv_source.assign(static_cast<size_t>(n_stages), -1);
  s.index_source = s.engram_index = s.kv_source;
  s.source_layer.clear();
  model_->target = std::move(target);
  model_->sizes = std::move(sizes);
  model_->weights.stages.resize(static_cast<size_t>(n_stages));
  for (auto& stage : model_->weights.stages) stage.moe.experts.resize(static_cast<size_t>(n_experts));
  slots_ = std::make_shared<ModelBuilderSlots>(ModelBuilderSlots{drafter_slots(*model_)});
}

void DrafterBuilder::matrix(const std::string& name, const std::string& type, int64_t rows, int64_t cols,
                            const uint8_t* data, int64_t n_bytes, const uint8_t* scale, int64_t n_scale_bytes) {
  set_matrix(slots_->slots, name, type, rows, cols, data, n_bytes, scale, n_scale_bytes);
}

void DrafterBuilder::vector(const std::string& name, const float* data, int64_t n) {
  set_vector(slots_->slots, model_->vectors, name, data, n);
}

std::shared_ptr<const DrafterModel> DrafterBuilder::build() {
  refuse_missing(slots_->slots);
#ifdef DS4_METAL
  if (model_->target->isa == metal::kName) model_->adopted = metal::adopt(model_->weights, model_->vectors);
#endif
  return std::move(model_);
}

}  // namespace ds4
