// Whole operations of the back end contract on numpy arrays, for tests.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "bindings/contract_bench.h"
#include "cpu/cpu.h"
#include "engine/builder.h"
#ifdef DS4_METAL
#include "metal_host/metal.h"
#endif

namespace ds4::py {

Shape shape_from(const nb::dict& d);

namespace {

Activations parse_mode(const std::string& mode) {
  if (mode == "bf16") return Activations::bf16;
  if (mode == "fp8") return Activations::fp8;
  need(mode == "fp32", "mode: bf16, fp8 or fp32");
  return Activations::fp32;
}

std::unique_ptr<Backend> backend_of(const std::string& isa, const Shape& shape, Activations mode, ThreadPool& pool) {
#ifdef DS4_METAL
  if (isa == metal::kName) return metal::make_backend(shape, mode);
#endif
  return cpu::make_backend(isa, shape, mode, pool);
}

}  // namespace

Bench::Bench(const nb::dict& shape, const std::string& mode, const std::string& isa, int threads)
    : shape(shape_from(shape)), pool(threads), backend(backend_of(isa, this->shape, parse_mode(mode), pool)) {}

Matrix Stage::matrix(const nb::tuple& t) {
  need(t.size() == 5, "matrix: (type, rows, cols, data, scale)");
  Matrix m;
  m.type = parse_row_type(nb::cast<std::string>(t[0]));
  m.rows = nb::cast<int>(t[1]);
  m.cols = nb::cast<int>(t[2]);
  const auto data = nb::cast<Bytes>(t[3]);
  m.row_bytes = row_bytes(m.type, m.cols);
  m.scale_row_bytes = scale_row_bytes(m.type, m.cols);
  need(static_cast<int64_t>(data.size()) == m.row_bytes * m.rows, "matrix: data size");
  m.data = in(data);
  if (m.scale_row_bytes > 0) {
    const auto scale = nb::cast<Bytes>(t[4]);
    const int64_t scale_rows = m.type == RowType::fp8_block ? (m.rows + 31) / 32 : m.rows;
    need(static_cast<int64_t>(scale.size()) == m.scale_row_bytes * scale_rows, "matrix: scale size");
    m.scale = in(scale);
  }
  return m;
}

namespace {

ExpertWeights expert_from(Stage& stage, const nb::tuple& t) {
  need(t.size() == 3, "expert: (w1, w2, w3)");
  return {stage.matrix(nb::cast<nb::tuple>(t[0])), stage.matrix(nb::cast<nb::tuple>(t[1])), stage.matrix(nb::cast<nb::tuple>(t[2]))};
}

// kv rows are given unpacked as bytes of packed rows; window_rows[j] belongs to position first + j.
// ring: rows of the ring that they lie in, 0: as many as there are.
nb::object attend(Bench& b, int64_t position, const Floats3& q, const Bytes2& window_rows, const std::optional<Bytes2>& compressed,
                  const std::optional<nb::list>& selected, const Floats1& sink, const Floats2& cos, const Floats2& sin, int64_t ring,
                  bool with_raw) {
  const Shape& s = b.shape;
  const size_t n = q.shape(0);
  need(q.shape(1) == static_cast<size_t>(s.n_heads) && q.shape(2) == static_cast<size_t>(s.head_dim), "attend: q [n, heads, head_dim]");
  need(window_rows.shape(1) == static_cast<size_t>(s.window_row_bytes()) && static_cast<int64_t>(window_rows.shape(0)) == position + static_cast<int64_t>(n),
       "attend: one packed window row for every position 0 .. position + n - 1");
  need(!compressed || compressed->shape(1) == static_cast<size_t>(s.compressed_row_bytes()), "attend: packed compressed rows");
  need(cos.shape(0) == n && sin.shape(0) == n && cos.shape(1) == static_cast<size_t>(s.rope_dim / 2), "attend: cos, sin [n, rope_dim / 2]");
  need(sink.size() == static_cast<size_t>(s.n_heads), "attend: one sink a head");
  std::vector<int32_t> list(n * s.index_topk), counts(n, 0);
  if (selected)
    for (size_t i = 0; i < n; ++i) {
      const auto row = nb::cast<std::vector<int32_t>>((*selected)[i]);
      need(row.size() <= static_cast<size_t>(s.index_topk), "attend: too many selected entries");
      for (int32_t j : row) need(j >= 0 && compressed && static_cast<size_t>(j) < compressed->shape(0), "attend: entry out of range");
      std::copy(row.begin(), row.end(), list.begin() + i * s.index_topk);
      counts[i] = static_cast<int32_t>(row.size());
    }
  Stage stage(b);
  const int64_t rows = static_cast<int64_t>(window_rows.shape(0));
  const int64_t capacity = ring > 0 ? ring : rows;
  need(capacity >= std::min<int64_t>(rows, s.window + static_cast<int64_t>(n) - 1), "attend: the ring is smaller than what the rows see");
  const RowRing window{stage.room<uint8_t>(static_cast<size_t>(capacity) * window_rows.shape(1)), capacity, s.window_row_bytes()};
  for (int64_t p = std::max<int64_t>(0, rows - capacity); p < rows; ++p)
    std::memcpy(window.row(p), window_rows.data() + p * s.window_row_bytes(), window_rows.shape(1));
  float* o = stage.room<float>(q.size());
  float* raw = stage.room<float>(q.size());
  FlushSubnormals flush;
  b.backend->attend({static_cast<int>(n), position, stage.in(q), window, compressed ? stage.in(*compressed) : nullptr,
                     stage.in(list.data(), list.size()), stage.in(counts.data(), counts.size()), stage.in(sink), stage.rope(cos, sin), o, raw});
  stage.finish();
  auto out = stage.take(o, {n, q.shape(1), q.shape(2)});
  if (!with_raw) return nb::cast(out);
  return nb::make_tuple(out, stage.take(raw, {n, q.shape(1), q.shape(2)}));
}

nb::dict select(Bench& b, int64_t position, int ratio, const Codes3& codes, const Floats3& scales, const Floats2& weights,
                const Bytes2& index_rows, const std::string& candidates, const std::optional<nb::list>& blocks, bool with_scores) {
  const Shape& s = b.shape;
  const size_t n = codes.shape(0);
  need(codes.shape(1) == static_cast<size_t>(s.index_heads) && codes.shape(2) == static_cast<size_t>(s.index_dim), "select: codes [n, heads, dim]");
  need(ratio == 1 || ratio == 2, "select: ratio 1 or 2");
  need(index_rows.shape(1) == static_cast<size_t>(s.index_row_bytes()) &&
           static_cast<int64_t>(index_rows.shape(0)) >= (position + static_cast<int64_t>(n)) / ratio,
       "select: packed index rows for every visible entry");
  need(scales.size() == n * s.index_heads * (s.index_dim / 32) && weights.size() == n * s.index_heads, "select: scales, weights");
  const int64_t stride = (position + static_cast<int64_t>(n)) / ratio;
  Stage stage(b);
  const size_t topk = static_cast<size_t>(s.index_topk), most = static_cast<size_t>(s.candidate_blocks);
  int32_t* selected = stage.room<int32_t>(n * topk);
  int32_t* counts = stage.room<int32_t>(n);
  int32_t* made = stage.room<int32_t>(n * most);
  int32_t* n_made = stage.room<int32_t>(n);
  float* scores = stage.room<float>(n * static_cast<size_t>(stride));
  std::fill(scores, scores + n * static_cast<size_t>(stride), -__builtin_inff());
  if (blocks)
    for (size_t i = 0; i < n; ++i) {
      const auto row = nb::cast<std::vector<int32_t>>((*blocks)[i]);
      need(row.size() <= static_cast<size_t>(s.candidate_blocks), "select: too many blocks");
      std::copy(row.begin(), row.end(), made + i * most);
      n_made[i] = static_cast<int32_t>(row.size());
    }
  const bool makes = candidates == "make", uses = candidates == "use";
  FlushSubnormals flush;
  b.backend->select({static_cast<int>(n), position, ratio, stage.in(codes), stage.in(scales), stage.in(weights), stage.in(index_rows),
                     selected, counts, makes ? made : nullptr, n_made, uses ? made : nullptr, n_made, with_scores ? scores : nullptr, stride});
  stage.finish();
  nb::dict out;
  out["selected"] = stage.take(selected, {n, topk});
  out["n_selected"] = stage.take(counts, {n});
  out["blocks"] = stage.take(made, {n, most});
  out["n_blocks"] = stage.take(n_made, {n});
  out["scores"] = stage.take(scores, {n, static_cast<size_t>(stride)});
  return out;
}

nb::tuple route(Bench& b, const Floats2& x, const nb::tuple& gate, const Floats1& bias) {
  const Shape& s = b.shape;
  Stage stage(b);
  MoeWeights w;
  w.gate = stage.matrix(gate);
  need(bias.size() == static_cast<size_t>(s.n_experts) && w.gate.rows == s.n_experts && w.gate.cols == s.hidden, "route: shapes");
  w.bias = stage.in(bias);
  const size_t n = x.shape(0), k = static_cast<size_t>(s.top_k);
  int32_t* ids = stage.room<int32_t>(n * k);
  float* weights = stage.room<float>(n * k);
  FlushSubnormals flush;
  b.backend->route({static_cast<int>(n), stage.in(x), &w, stage.room<float>(n * s.n_experts), ids, weights});
  stage.finish();
  return nb::make_tuple(stage.take(ids, {n, k}), stage.take(weights, {n, k}));
}

Out<float> moe(Bench& b, const Floats2& x, const Ints2& ids, const Floats2& weights, const nb::list& experts, const nb::tuple& shared) {
  const Shape& s = b.shape;
  Stage stage(b);
  MoeWeights w;
  for (nb::handle e : experts) w.experts.push_back(expert_from(stage, nb::cast<nb::tuple>(e)));
  w.shared = expert_from(stage, shared);
  need(static_cast<int>(w.experts.size()) == s.n_experts, "moe: one tuple an expert");
  const size_t n = x.shape(0);
  need(ids.shape(0) == n && ids.shape(1) == static_cast<size_t>(s.top_k) && weights.size() == ids.size(), "moe: ids, weights [n, top_k]");
  for (size_t i = 0; i < ids.size(); ++i) need(ids.data()[i] >= 0 && ids.data()[i] < s.n_experts, "moe: expert id out of range");
  const size_t d = static_cast<size_t>(s.hidden);
  float* y = stage.room<float>(n * d);
  FlushSubnormals flush;
  b.backend->moe({static_cast<int>(n), stage.in(x), &w, stage.in(ids), stage.in(weights),
                  stage.room<float>(n * static_cast<size_t>(s.top_k + 1) * static_cast<size_t>(s.expert_dim)), y});
  stage.finish();
  return stage.take(y, {n, d});
}

Out<float> engram(Bench& b, const Bytes& rows, const Floats1& q_weight, const Floats1& k_weight, const nb::tuple& wkv, const Floats3& stream) {
  const Shape& s = b.shape;
  const size_t n = stream.shape(0), c = stream.shape(1), d = stream.shape(2);
  need(c == static_cast<size_t>(s.n_streams) && d == static_cast<size_t>(s.hidden), "engram: stream [n, streams, hidden]");
  need(rows.size() == n * s.engram_columns * s.engram_row_bytes(), "engram: rows");
  need(q_weight.size() == c * d && k_weight.size() == c * d, "engram: norm weights");
  Stage stage(b);
  const EngramWeights w{stage.in(q_weight), stage.in(k_weight), stage.matrix(wkv)};
  float* out = stage.in(stream);
  FlushSubnormals flush;
  b.backend->engram({static_cast<int>(n), stage.in(rows), &w, out});
  stage.finish();
  return stage.take(out, {n, c, d});
}

// Feeds rows position .. position + n - 1; `pending` [2 head_dim] is the open pair's first row when position is odd.
nb::dict compress(Bench& b, int64_t position, int ratio, const Floats2& x, const nb::tuple& wkv, const std::optional<nb::tuple>& wgate,
                  const Floats1& norm, const nb::tuple& wk, const Floats1& k_norm, const Floats2& cos, const Floats2& sin,
                  const std::optional<Floats1>& pending, int64_t capacity) {
  const Shape& s = b.shape;
  Stage stage(b);
  const CompressorWeights w{stage.matrix(wkv), wgate ? stage.matrix(*wgate) : Matrix{}, stage.in(norm), stage.matrix(wk), stage.in(k_norm)};
  const size_t n = x.shape(0);
  const int64_t total = (position + static_cast<int64_t>(n)) / ratio;
  const size_t width = 2 * static_cast<size_t>(s.head_dim), row_size = static_cast<size_t>(s.compressed_row_bytes()),
               key_size = static_cast<size_t>(s.index_row_bytes());
  float* ring = stage.room<float>(static_cast<size_t>(capacity) * width);
  const RowRing open{reinterpret_cast<uint8_t*>(ring), capacity, static_cast<int>(width * sizeof(float))};
  if (pending) std::memcpy(open.row(position - 1), pending->data(), pending->size() * sizeof(float));
  uint8_t* rows = stage.room<uint8_t>(static_cast<size_t>(total) * row_size);
  uint8_t* keys = stage.room<uint8_t>(static_cast<size_t>(total) * key_size);
  need(cos.shape(0) == static_cast<size_t>(position) + n, "compress: cos, sin of positions 0 .. position + n - 1");
  FlushSubnormals flush;
  b.backend->compress({static_cast<int>(n), position, ratio, stage.in(x), &w, stage.rope(cos, sin), 0, open, rows, keys});
  stage.finish();
  nb::dict out;
  out["rows"] = stage.take(rows, {static_cast<size_t>(total), row_size});
  out["index_rows"] = stage.take(keys, {static_cast<size_t>(total), key_size});
  out["pending"] = stage.take(ring, {static_cast<size_t>(capacity), width});
  return out;
}

}  // namespace

void bind_contract_ops(nb::module_& m) {
  nb::class_<Bench> bench(m, "Backend", "A back end of a given shape, for tests of whole operations.");
  bench
      .def(nb::init<const nb::dict&, const std::string&, const std::string&, int>(), nb::arg("shape"), nb::arg("mode"), nb::arg("isa"),
           nb::arg("threads"))
      .def("attend", &attend, nb::arg("position"), nb::arg("q"), nb::arg("window_rows"), nb::arg("compressed").none(),
           nb::arg("selected").none(), nb::arg("sink"), nb::arg("cos"), nb::arg("sin"), nb::arg("ring") = 0,
           nb::arg("with_raw") = false)
      .def("select", &select, nb::arg("position"), nb::arg("ratio"), nb::arg("codes"), nb::arg("scales"), nb::arg("weights"),
           nb::arg("index_rows"), nb::arg("candidates") = "none", nb::arg("blocks") = nb::none(), nb::arg("with_scores") = true)
      .def("route", &route, nb::arg("x"), nb::arg("gate"), nb::arg("bias"))
      .def("moe", &moe, nb::arg("x"), nb::arg("ids"), nb::arg("weights"), nb::arg("experts"), nb::arg("shared"))
      .def("engram", &engram, nb::arg("rows"), nb::arg("q_weight"), nb::arg("k_weight"), nb::arg("wkv"), nb::arg("stream"))
      .def("compress", &compress, nb::arg("position"), nb::arg("ratio"), nb::arg("x"), nb::arg("wkv"), nb::arg("wgate").none(),
           nb::arg("norm"), nb::arg("wk"), nb::arg("k_norm"), nb::arg("cos"), nb::arg("sin"), nb::arg("pending") = nb::none(), nb::arg("capacity") = 64);
  bind_draft_ops(bench);
  bind_layer_ops(bench);
}

}  // namespace ds4::py
