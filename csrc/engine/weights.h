// Named views of the weights of one model. Nothing is copied: matrices stay in the mapped file and are decoded
// where they are used; only short vectors (norms, biases, sinks) are expanded to f32 when the model is opened.
#pragma once

#include <cstdint>
#include <vector>

namespace ds4 {

// How a row of a matrix is stored. docs/numerics.md says how each decodes to f32.
enum class RowType : uint8_t {
  f32,
  f16,
  bf16,
  fp8_block,  // e4m3, one e8m0 scale per 32 x 32 block
  fp8_row,    // e4m3, one e8m0 scale per row and 32 columns
  fp4_row,    // e2m1 pairs (low nibble first), one e8m0 scale per row and 32 columns
  q8_0,
  q4_k,
  mxfp4,
  q2_k,
  iq2_xxs,
};

struct Matrix {
  RowType type = RowType::f32;
  int rows = 0, cols = 0;
  const uint8_t* data = nullptr;
  const uint8_t* scale = nullptr;
  int64_t row_bytes = 0;
  int64_t scale_row_bytes = 0;  // per row, or per 32 rows for fp8_block
  bool empty() const { return data == nullptr; }
  int64_t bytes() const {
    const int64_t scale_rows = type == RowType::fp8_block ? (rows + 31) / 32 : rows;
    return row_bytes * rows + (scale != nullptr ? scale_row_bytes * scale_rows : 0);
  }
};

struct HcWeights {  // one hyper-connection mixer and the norm that follows its collapse
  Matrix fn;        // [(2 + C) C, C D]
  const float* scale = nullptr;  // [3]
  const float* base = nullptr;   // [(2 + C) C]
  const float* norm = nullptr;   // [D]
};

struct CompressorWeights {
  Matrix wkv, wgate;  // [hd, D]; wgate only for ratio 2
  const float* norm = nullptr;
  Matrix index_k;  // [index_dim, hd]
  const float* index_k_norm = nullptr;
};

struct IndexerWeights {
  Matrix wq_b;          // [index_heads index_dim, q_rank]
  Matrix weights_proj;  // [index_heads, D]
};

struct EngramWeights {
  const float* q_weight = nullptr;  // [C, D]
  const float* k_weight = nullptr;  // [C, D]
  Matrix wkv;                       // [(C + 1) D, columns dim]
};

struct ExpertWeights {
  Matrix w1, w2, w3;  // gate, down, up
};

struct AttentionWeights {
  Matrix wq_a, wq_b, wkv, wo_a, wo_b;
  const float* q_norm = nullptr;
  const float* kv_norm = nullptr;
  const float* sink = nullptr;
};

struct MoeWeights {
  Matrix gate;
  const float* bias = nullptr;
  std::vector<ExpertWeights> experts;
  ExpertWeights shared;
};

struct LayerWeights {
  HcWeights hc_attn, hc_ffn;
  AttentionWeights attn;
  CompressorWeights compressor;  // kv sources
  IndexerWeights indexer;        // index sources
  EngramWeights engram;          // Engram layers
  MoeWeights moe;
};

struct Weights {
  Matrix embed, head;
  const float* norm = nullptr;
  std::vector<LayerWeights> layers;
};

struct DrafterWeights {
  Matrix main_proj;  // [D, targets D], owned by the first stage
  const float* main_norm = nullptr;
  std::vector<LayerWeights> stages;  // mixers, attention and experts only
  const float* norm = nullptr;       // from here on owned by the last stage
  Matrix markov_embed, markov_head;  // [vocab, rank]
  Matrix confidence;                 // [1, D + rank]
};

}  // namespace ds4
