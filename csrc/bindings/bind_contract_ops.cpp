// Whole operations of the back end contract on numpy arrays, for tests.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <vector>

#include "base/error.h"
#include "bindings/bindings.h"
#include "cpu/cpu.h"
#include "engine/builder.h"

namespace ds4::py {

Shape shape_from(const nb::dict& d);

namespace {

using Ints2 = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bytes2 = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Codes3 = nb::ndarray<const int8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

void need(bool ok, const char* what) {
  if (!ok) throw OptionError(std::string("[ops] ") + what);
}

Activations parse_mode(const std::string& mode) {
  if (mode == "bf16") return Activations::bf16;
  if (mode == "fp8") return Activations::fp8;
  need(mode == "fp32", "mode: bf16, fp8 or fp32");
  return Activations::fp32;
}

// A back end of any shape, with matrices that live in the caller's arrays.
struct Bench {
  Bench(const nb::dict& shape, const std::string& mode, const std::string& isa, int threads)
      : shape(shape_from(shape)), pool(threads), backend(cpu::make_backend(isa, this->shape, parse_mode(mode), pool)) {}
  Shape shape;
  ThreadPool pool;
  std::unique_ptr<Backend> backend;
};

// (type, rows, cols, data, scale or None)
Matrix matrix_from(const nb::tuple& t) {
  need(t.size() == 5, "matrix: (type, rows, cols, data, scale)");
  Matrix m;
  m.type = parse_row_type(nb::cast<std::string>(t[0]));
  m.rows = nb::cast<int>(t[1]);
  m.cols = nb::cast<int>(t[2]);
  const auto data = nb::cast<Bytes>(t[3]);
  m.data = data.data();
  m.row_bytes = row_bytes(m.type, m.cols);
  m.scale_row_bytes = scale_row_bytes(m.type, m.cols);
  need(static_cast<int64_t>(data.size()) == m.row_bytes * m.rows, "matrix: data size");
  if (m.scale_row_bytes > 0) {
    const auto scale = nb::cast<Bytes>(t[4]);
    m.scale = scale.data();
    const int64_t scale_rows = m.type == RowType::fp8_block ? (m.rows + 31) / 32 : m.rows;
    need(static_cast<int64_t>(scale.size()) == m.scale_row_bytes * scale_rows, "matrix: scale size");
  }
  return m;
}

ExpertWeights expert_from(const nb::tuple& t) {
  need(t.size() == 3, "expert: (w1, w2, w3)");
  return {matrix_from(nb::cast<nb::tuple>(t[0])), matrix_from(nb::cast<nb::tuple>(t[1])), matrix_from(nb::cast<nb::tuple>(t[2]))};
}

// kv rows are given unpacked as bytes of packed rows; window_rows[j] belongs to position first + j.
Out<float> attend(Bench& b, int64_t position, const Floats3& q, const Bytes2& window_rows, const std::optional<Bytes2>& compressed,
                  const std::optional<nb::list>& selected, const Floats1& sink, const Floats2& cos, const Floats2& sin) {
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
  auto out = make_array<float>({n, q.shape(1), q.shape(2)});
  const RowRing ring{const_cast<uint8_t*>(window_rows.data()), static_cast<int64_t>(window_rows.shape(0)), s.window_row_bytes()};
  FlushSubnormals flush;
  b.backend->attend({static_cast<int>(n), position, q.data(), ring, compressed ? compressed->data() : nullptr, list.data(), counts.data(),
                     sink.data(), Rope{cos.data(), sin.data()}, out.data(), nullptr});
  return out;
}

nb::dict select(Bench& b, int64_t position, int ratio, const Codes3& codes, const Floats3& scales, const Floats2& weights,
                const Bytes2& index_rows, const std::string& candidates, const std::optional<nb::list>& blocks) {
  const Shape& s = b.shape;
  const size_t n = codes.shape(0);
  need(codes.shape(1) == static_cast<size_t>(s.index_heads) && codes.shape(2) == static_cast<size_t>(s.index_dim), "select: codes [n, heads, dim]");
  need(ratio == 1 || ratio == 2, "select: ratio 1 or 2");
  need(index_rows.shape(1) == static_cast<size_t>(s.index_row_bytes()) &&
           static_cast<int64_t>(index_rows.shape(0)) >= (position + static_cast<int64_t>(n)) / ratio,
       "select: packed index rows for every visible entry");
  need(scales.size() == n * s.index_heads * (s.index_dim / 32) && weights.size() == n * s.index_heads, "select: scales, weights");
  const int64_t stride = (position + static_cast<int64_t>(n)) / ratio;
  auto selected = make_array<int32_t>({n, static_cast<size_t>(s.index_topk)});
  auto counts = make_array<int32_t>({n});
  auto made = make_array<int32_t>({n, static_cast<size_t>(s.candidate_blocks)});
  auto n_made = make_array<int32_t>({n});
  auto scores = make_array<float>({n, static_cast<size_t>(stride)});
  std::fill(scores.data(), scores.data() + n * stride, -__builtin_inff());
  if (blocks)
    for (size_t i = 0; i < n; ++i) {
      const auto row = nb::cast<std::vector<int32_t>>((*blocks)[i]);
      need(row.size() <= static_cast<size_t>(s.candidate_blocks), "select: too many blocks");
      std::copy(row.begin(), row.end(), made.data() + i * s.candidate_blocks);
      n_made.data()[i] = static_cast<int32_t>(row.size());
    }
  const bool makes = candidates == "make", uses = candidates == "use";
  FlushSubnormals flush;
  b.backend->select({static_cast<int>(n), position, ratio, codes.data(), scales.data(), weights.data(), index_rows.data(), selected.data(),
                     counts.data(), makes ? made.data() : nullptr, n_made.data(), uses ? made.data() : nullptr, n_made.data(),
                     scores.data(), stride});
  nb::dict out;
  out["selected"] = selected;
  out["n_selected"] = counts;
  out["blocks"] = made;
  out["n_blocks"] = n_made;
  out["scores"] = scores;
  return out;
}

nb::tuple route(Bench& b, const Floats2& x, const nb::tuple& gate, const Floats1& bias) {
  const Shape& s = b.shape;
  MoeWeights w;
  w.gate = matrix_from(gate);
  need(bias.size() == static_cast<size_t>(s.n_experts) && w.gate.rows == s.n_experts && w.gate.cols == s.hidden, "route: shapes");
  w.bias = bias.data();
  const size_t n = x.shape(0), k = static_cast<size_t>(s.top_k);
  std::vector<float> scores(n * s.n_experts);
  auto ids = make_array<int32_t>({n, k});
  auto weights = make_array<float>({n, k});
  FlushSubnormals flush;
  b.backend->route({static_cast<int>(n), x.data(), &w, scores.data(), ids.data(), weights.data()});
  return nb::make_tuple(ids, weights);
}

Out<float> moe(Bench& b, const Floats2& x, const Ints2& ids, const Floats2& weights, const nb::list& experts, const nb::tuple& shared) {
  const Shape& s = b.shape;
  MoeWeights w;
  for (nb::handle e : experts) w.experts.push_back(expert_from(nb::cast<nb::tuple>(e)));
  w.shared = expert_from(shared);
  need(static_cast<int>(w.experts.size()) == s.n_experts, "moe: one tuple an expert");
  const size_t n = x.shape(0);
  need(ids.shape(0) == n && ids.shape(1) == static_cast<size_t>(s.top_k) && weights.size() == ids.size(), "moe: ids, weights [n, top_k]");
  for (size_t i = 0; i < ids.size(); ++i) need(ids.data()[i] >= 0 && ids.data()[i] < s.n_experts, "moe: expert id out of range");
  std::vector<float> mid(n * (s.top_k + 1) * s.expert_dim);
  auto out = make_array<float>({n, static_cast<size_t>(s.hidden)});
  FlushSubnormals flush;
  b.backend->moe({static_cast<int>(n), x.data(), &w, ids.data(), weights.data(), mid.data(), out.data()});
  return out;
}

Out<float> engram(Bench& b, const Bytes& rows, const Floats1& q_weight, const Floats1& k_weight, const nb::tuple& wkv, const Floats3& stream) {
  const Shape& s = b.shape;
  const size_t n = stream.shape(0), c = stream.shape(1), d = stream.shape(2);
  need(c == static_cast<size_t>(s.n_streams) && d == static_cast<size_t>(s.hidden), "engram: stream [n, streams, hidden]");
  need(rows.size() == n * s.engram_columns * s.engram_row_bytes(), "engram: rows");
  need(q_weight.size() == c * d && k_weight.size() == c * d, "engram: norm weights");
  EngramWeights w{q_weight.data(), k_weight.data(), matrix_from(wkv)};
  auto out = make_array<float>({n, c, d});
  std::copy(stream.data(), stream.data() + stream.size(), out.data());
  FlushSubnormals flush;
  b.backend->engram({static_cast<int>(n), rows.data(), &w, out.data()});
  return out;
}

// Feeds rows position .. position + n - 1; `pending` [2 head_dim] is the open pair's first row when position is odd.
nb::dict compress(Bench& b, int64_t position, int ratio, const Floats2& x, const nb::tuple& wkv, const std::optional<nb::tuple>& wgate,
                  const Floats1& norm, const nb::tuple& wk, const Floats1& k_norm, const Floats2& cos, const Floats2& sin,
                  const std::optional<Floats1>& pending) {
  const Shape& s = b.shape;
  CompressorWeights w{matrix_from(wkv), wgate ? matrix_from(*wgate) : Matrix{}, norm.data(), matrix_from(wk), k_norm.data()};
  const size_t n = x.shape(0);
  const int64_t total = (position + static_cast<int64_t>(n)) / ratio;
  std::vector<float> ring(64 * 2 * static_cast<size_t>(s.head_dim));
  const RowRing open{reinterpret_cast<uint8_t*>(ring.data()), 64, 2 * s.head_dim * static_cast<int>(sizeof(float))};
  if (pending) std::memcpy(open.row(position - 1), pending->data(), pending->size() * sizeof(float));
  auto rows = make_array<uint8_t>({static_cast<size_t>(total), static_cast<size_t>(s.compressed_row_bytes())});
  auto keys = make_array<uint8_t>({static_cast<size_t>(total), static_cast<size_t>(s.index_row_bytes())});
  need(cos.shape(0) == static_cast<size_t>(position) + n, "compress: cos, sin of positions 0 .. position + n - 1");
  FlushSubnormals flush;
  b.backend->compress({static_cast<int>(n), position, ratio, x.data(), &w, Rope{cos.data(), sin.data()}, 0, open, rows.data(), keys.data()});
  nb::dict out;
  out["rows"] = rows;
  out["index_rows"] = keys;
  return out;
}

}  // namespace

void bind_contract_ops(nb::module_& m) {
  nb::class_<Bench>(m, "Backend", "A CPU back end of a given shape, for tests of whole operations.")
      .def(nb::init<const nb::dict&, const std::string&, const std::string&, int>(), nb::arg("shape"), nb::arg("mode"), nb::arg("isa"),
           nb::arg("threads"))
      .def("attend", &attend, nb::arg("position"), nb::arg("q"), nb::arg("window_rows"), nb::arg("compressed").none(),
           nb::arg("selected").none(), nb::arg("sink"), nb::arg("cos"), nb::arg("sin"))
      .def("select", &select, nb::arg("position"), nb::arg("ratio"), nb::arg("codes"), nb::arg("scales"), nb::arg("weights"),
           nb::arg("index_rows"), nb::arg("candidates") = "none", nb::arg("blocks") = nb::none())
      .def("route", &route, nb::arg("x"), nb::arg("gate"), nb::arg("bias"))
      .def("moe", &moe, nb::arg("x"), nb::arg("ids"), nb::arg("weights"), nb::arg("experts"), nb::arg("shared"))
      .def("engram", &engram, nb::arg("rows"), nb::arg("q_weight"), nb::arg("k_weight"), nb::arg("wkv"), nb::arg("stream"))
      .def("compress", &compress, nb::arg("position"), nb::arg("ratio"), nb::arg("x"), nb::arg("wkv"), nb::arg("wgate").none(),
           nb::arg("norm"), nb::arg("wk"), nb::arg("k_norm"), nb::arg("cos"), nb::arg("sin"), nb::arg("pending") = nb::none());
}

}  // namespace ds4::py
