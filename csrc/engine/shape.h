// Sizes of one model, from its validated configuration (src/ds4v41/checkpoint/config.py checks them before they come here).
#pragma once

#include <cstdint>
#include <vector>

namespace ds4 {

// What activations are rounded to (docs/numerics.md, modes).
enum class Activations : uint8_t { bf16, fp8, fp32 };

struct Shape {
  int vocab = 0, hidden = 0, n_layers = 0;
  int n_heads = 0, head_dim = 0, rope_dim = 0;
  int q_rank = 0, o_rank = 0, o_groups = 0;
  int n_experts = 0, top_k = 0, expert_dim = 0;
  float route_scale = 1.0f, swiglu_limit = 10.0f, norm_eps = 1e-20f;
  int window = 0;
  int index_heads = 0, index_dim = 0, index_topk = 0;
  int candidate_source = -1, candidate_blocks = 0, candidate_block_size = 0;
  int n_streams = 4, sinkhorn_iters = 20;
  float hc_eps = 1e-6f;
  int engram_columns = 0, engram_dim = 0;
  int max_context = 0;
  double rope_base = 10000.0, compress_rope_base = 160000.0;
  double yarn_factor = 1.0, yarn_beta_fast = 32.0, yarn_beta_slow = 1.0, yarn_original = 0.0;

  std::vector<int> ratio;         // [n_layers] 0: window only; else tokens per compressed row
  std::vector<int> kv_source;     // [n_layers] index of the compressed cache that the layer reads, -1: none
  std::vector<int> index_source;  // [n_layers] layer whose selection is used, -1: none
  std::vector<int> engram_index;  // [n_layers] index of the layer's table, -1: none
  std::vector<int> source_layer;  // [n_sources] layer that fills the cache

  int n_sources() const { return static_cast<int>(source_layer.size()); }
  int mix_rows() const { return (2 + n_streams) * n_streams; }
  int group_dim() const { return n_heads * head_dim / o_groups; }

  // Bytes of one packed cache row (docs/formats.md).
  int window_row_bytes() const { return head_dim + head_dim / 32; }
  int compressed_row_bytes() const { return head_dim / 2 + head_dim / 16; }
  int index_row_bytes() const { return index_dim / 2 + index_dim / 32; }
  int engram_row_bytes() const { return engram_dim + engram_dim / 32; }
};

}  // namespace ds4
