// Single operations of a layer's projections and hyper-connections, embed and head, on numpy arrays, for tests.
#include "bindings/contract_bench.h"

namespace ds4::py {

namespace {

nb::tuple embed(Bench& b, const Tokens& tokens, const nb::tuple& table) {
  const Shape& s = b.shape;
  const size_t n = tokens.size(), c = static_cast<size_t>(s.n_streams), d = static_cast<size_t>(s.hidden);
  Stage stage(b);
  const Matrix m = stage.matrix(table);
  need(m.cols == s.hidden, "embed: the table has `hidden` columns");
  for (size_t i = 0; i < n; ++i) need(tokens.data()[i] >= 0 && tokens.data()[i] < m.rows, "embed: token out of range");
  float* stream = stage.room<float>(n * c * d);
  float* mix = stage.room<float>(n * c);
  FlushSubnormals flush;
  b.backend->embed({static_cast<int>(n), stage.in(tokens), &m, stream, mix});
  stage.finish();
  return nb::make_tuple(stage.take(stream, {n, c, d}), stage.take(mix, {n, c}));
}

// x, xq, pre, post, comb
nb::tuple hc_read(Bench& b, const Floats3& stream, const Floats2& mix, const nb::tuple& fn, const Floats1& scale, const Floats1& base,
                  const Floats1& norm, bool separate) {
  const Shape& s = b.shape;
  const size_t n = stream.shape(0), c = stream.shape(1), d = stream.shape(2);
  need(c == static_cast<size_t>(s.n_streams) && d == static_cast<size_t>(s.hidden) && mix.size() == n * c, "hc_read: stream, mix");
  Stage stage(b);
  HcWeights w{stage.matrix(fn), stage.in(scale), stage.in(base), stage.in(norm)};
  need(w.fn.rows == s.mix_rows() && static_cast<size_t>(w.fn.cols) == c * d && scale.size() == 3 && norm.size() == d &&
           base.size() == static_cast<size_t>(s.mix_rows()),
       "hc_read: weights");
  float* x = stage.room<float>(n * d);
  float* xq = separate ? stage.room<float>(n * d) : x;
  float* pre = stage.room<float>(n * c);
  float* post = stage.room<float>(n * c);
  float* comb = stage.room<float>(n * c * c);
  FlushSubnormals flush;
  b.backend->hc_read({static_cast<int>(n), stage.in(stream), stage.in(mix), &w, x, xq, pre, post, comb});
  stage.finish();
  return nb::make_tuple(stage.take(x, {n, d}), stage.take(xq, {n, d}), stage.take(pre, {n, c}), stage.take(post, {n, c}),
                        stage.take(comb, {n, c, c}));
}

Out<float> hc_write(Bench& b, const Floats2& y, const Floats2& post, const Floats3& comb, const Floats3& stream) {
  const size_t n = stream.shape(0), c = stream.shape(1), d = stream.shape(2);
  need(y.size() == n * d && post.size() == n * c && comb.size() == n * c * c, "hc_write: shapes");
  Stage stage(b);
  float* out = stage.in(stream);
  FlushSubnormals flush;
  b.backend->hc_write({static_cast<int>(n), stage.in(y), stage.in(post), stage.in(comb), out});
  stage.finish();
  return stage.take(out, {n, c, d});
}

// The low-rank query, and the ring after the call [capacity, row bytes]; it starts zeroed.
nb::tuple attn_in(Bench& b, int64_t position, const Floats2& x, const nb::tuple& wq_a, const nb::tuple& wkv, const Floats1& q_norm,
                  const Floats1& kv_norm, const Floats2& cos, const Floats2& sin, int64_t capacity) {
  const Shape& s = b.shape;
  const size_t n = x.shape(0), size = static_cast<size_t>(s.window_row_bytes()), q = static_cast<size_t>(s.q_rank);
  need(x.shape(1) == static_cast<size_t>(s.hidden) && q_norm.size() == q && kv_norm.size() == static_cast<size_t>(s.head_dim), "attn_in: shapes");
  need(capacity >= static_cast<int64_t>(n) && cos.shape(0) == n && sin.shape(0) == n, "attn_in: capacity, cos, sin");
  Stage stage(b);
  AttentionWeights w;
  w.wq_a = stage.matrix(wq_a);
  w.wkv = stage.matrix(wkv);
  w.q_norm = stage.in(q_norm);
  w.kv_norm = stage.in(kv_norm);
  const RowRing ring{stage.room<uint8_t>(static_cast<size_t>(capacity) * size), capacity, static_cast<int>(size)};
  float* qr = stage.room<float>(n * q);
  FlushSubnormals flush;
  b.backend->attn_in({static_cast<int>(n), position, stage.in(x), &w, stage.rope(cos, sin), qr, ring});
  stage.finish();
  return nb::make_tuple(stage.take(qr, {n, q}), stage.take(ring.base, {static_cast<size_t>(capacity), size}));
}

Out<float> attn_query(Bench& b, const Floats2& qr, const nb::tuple& wq_b, const Floats2& cos, const Floats2& sin) {
  const Shape& s = b.shape;
  const size_t n = qr.shape(0), heads = static_cast<size_t>(s.n_heads), hd = static_cast<size_t>(s.head_dim);
  Stage stage(b);
  AttentionWeights w;
  w.wq_b = stage.matrix(wq_b);
  need(w.wq_b.rows == s.n_heads * s.head_dim && static_cast<size_t>(w.wq_b.cols) == qr.shape(1), "attn_query: shapes");
  float* out = stage.room<float>(n * heads * hd);
  FlushSubnormals flush;
  b.backend->attn_query({static_cast<int>(n), stage.in(qr), &w, stage.rope(cos, sin), out});
  stage.finish();
  return stage.take(out, {n, heads, hd});
}

// y and the streams after the expand that follows, which a back end may do in one.
nb::tuple attn_out(Bench& b, const Floats3& o, const nb::tuple& wo_a, const nb::tuple& wo_b, const Floats2& post, const Floats3& comb,
                   const Floats3& stream) {
  const Shape& s = b.shape;
  const size_t n = o.shape(0), c = stream.shape(1), d = static_cast<size_t>(s.hidden);
  Stage stage(b);
  AttentionWeights w;
  w.wo_a = stage.matrix(wo_a);
  w.wo_b = stage.matrix(wo_b);
  need(w.wo_a.rows == s.o_groups * s.o_rank && w.wo_a.cols == s.group_dim() && w.wo_b.rows == s.hidden, "attn_out: shapes");
  float* low = stage.room<float>(n * static_cast<size_t>(s.o_groups * s.o_rank));
  float* y = stage.room<float>(n * d);
  float* out = stage.in(stream);
  FlushSubnormals flush;
  b.backend->attn_out({static_cast<int>(n), stage.in(o), &w, low, y});
  b.backend->hc_write({static_cast<int>(n), y, stage.in(post), stage.in(comb), out});
  stage.finish();
  return nb::make_tuple(stage.take(y, {n, d}), stage.take(out, {n, c, d}));
}

nb::tuple head(Bench& b, const Floats3& stream, const Floats2& mix, const Floats1& norm, const nb::tuple& matrix) {
  const Shape& s = b.shape;
  const size_t n = stream.shape(0), d = stream.shape(2), vocab = static_cast<size_t>(s.vocab);
  need(norm.size() == d && mix.size() == n * stream.shape(1), "head: shapes");
  Stage stage(b);
  const Matrix m = stage.matrix(matrix);
  need(m.rows == s.vocab && m.cols == s.hidden, "head: matrix");
  float* x = stage.room<float>(n * d);
  float* logits = stage.room<float>(n * vocab);
  FlushSubnormals flush;
  b.backend->head({static_cast<int>(n), stage.in(stream), stage.in(mix), stage.in(norm), &m, x, logits});
  stage.finish();
  return nb::make_tuple(stage.take(x, {n, d}), stage.take(logits, {n, vocab}));
}

}  // namespace

void bind_layer_ops(nb::class_<Bench>& bench) {
  bench.def("embed", &embed, nb::arg("tokens"), nb::arg("table"))
      .def("hc_read", &hc_read, nb::arg("stream"), nb::arg("mix"), nb::arg("fn"), nb::arg("scale"), nb::arg("base"), nb::arg("norm"),
           nb::arg("separate") = false)
      .def("hc_write", &hc_write, nb::arg("y"), nb::arg("post"), nb::arg("comb"), nb::arg("stream"))
      .def("attn_in", &attn_in, nb::arg("position"), nb::arg("x"), nb::arg("wq_a"), nb::arg("wkv"), nb::arg("q_norm"), nb::arg("kv_norm"),
           nb::arg("cos"), nb::arg("sin"), nb::arg("capacity"))
      .def("attn_query", &attn_query, nb::arg("qr"), nb::arg("wq_b"), nb::arg("cos"), nb::arg("sin"))
      .def("attn_out", &attn_out, nb::arg("o"), nb::arg("wo_a"), nb::arg("wo_b"), nb::arg("post"), nb::arg("comb"), nb::arg("stream"))
      .def("head", &head, nb::arg("stream"), nb::arg("mix"), nb::arg("norm"), nb::arg("matrix"));
}

}  // namespace ds4::py
