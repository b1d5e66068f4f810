// Single operations of the index queries and of the drafter on numpy arrays, for tests.
#include <nanobind/stl/optional.h>

#include "bindings/contract_bench.h"

namespace ds4::py {

namespace {

nb::tuple index_query(Bench& b, const Floats2& qr, const Floats2& x, const nb::tuple& wq_b, const nb::tuple& weights_proj,
                      const Floats2& cos, const Floats2& sin) {
  const Shape& s = b.shape;
  const size_t n = qr.shape(0), heads = static_cast<size_t>(s.index_heads), dim = static_cast<size_t>(s.index_dim);
  need(qr.shape(1) == static_cast<size_t>(s.q_rank) && x.shape(0) == n && x.shape(1) == static_cast<size_t>(s.hidden), "index_query: qr, x");
  need(cos.shape(0) == n && sin.shape(0) == n, "index_query: cos, sin [n, rope_dim / 2]");
  Stage stage(b);
  const IndexerWeights w{stage.matrix(wq_b), stage.matrix(weights_proj)};
  int8_t* codes = stage.room<int8_t>(n * heads * dim);
  float* scales = stage.room<float>(n * heads * dim / 32);
  float* weights = stage.room<float>(n * heads);
  FlushSubnormals flush;
  b.backend->index_query({static_cast<int>(n), stage.in(qr), stage.in(x), &w, stage.rope(cos, sin), codes, scales, weights});
  stage.finish();
  return nb::make_tuple(stage.take(codes, {n, heads, dim}), stage.take(scales, {n, heads, dim / 32}), stage.take(weights, {n, heads}));
}

void need_stream(const Shape& s, const Floats3& stream) {
  need(stream.shape(1) == static_cast<size_t>(s.n_streams) && stream.shape(2) == static_cast<size_t>(s.hidden), "stream [n, streams, hidden]");
}

// stride: floats from one result to the next.
Out<float> stream_mean(Bench& b, const Floats3& stream, int64_t stride) {
  need_stream(b.shape, stream);
  need(stride >= b.shape.hidden, "stream_mean: stride");
  const size_t n = stream.shape(0);
  Stage stage(b);
  float* out = stage.room<float>(n * static_cast<size_t>(stride));
  FlushSubnormals flush;
  b.backend->stream_mean({static_cast<int>(n), stage.in(stream), out, stride});
  stage.finish();
  return stage.take(out, {n, static_cast<size_t>(stride)});
}

Out<float> collapse(Bench& b, const Floats3& stream, const Floats2& mix) {
  need_stream(b.shape, stream);
  const size_t n = stream.shape(0), d = stream.shape(2);
  need(mix.shape(0) == n && mix.shape(1) == stream.shape(1), "collapse: mix [n, streams]");
  Stage stage(b);
  float* out = stage.room<float>(n * d);
  FlushSubnormals flush;
  b.backend->collapse({static_cast<int>(n), stage.in(stream), stage.in(mix), out});
  stage.finish();
  return stage.take(out, {n, d});
}

Out<float> draft_main(Bench& b, const Floats2& main, const nb::tuple& w, const Floats1& norm) {
  const size_t n = main.shape(0), d = static_cast<size_t>(b.shape.hidden);
  Stage stage(b);
  const Matrix m = stage.matrix(w);
  need(m.rows == b.shape.hidden && static_cast<size_t>(m.cols) == main.shape(1) && norm.size() == d, "draft_main: shapes");
  float* x = stage.room<float>(n * d);
  FlushSubnormals flush;
  b.backend->draft_main({static_cast<int>(n), stage.in(main), &m, stage.in(norm), x});
  stage.finish();
  return stage.take(x, {n, d});
}

// The ring after the call, [capacity, row bytes]; it starts zeroed.
Out<uint8_t> draft_window(Bench& b, int64_t position, const Floats2& x, const nb::tuple& wkv, const Floats1& norm, const Floats2& cos,
                          const Floats2& sin, int64_t capacity) {
  const Shape& s = b.shape;
  const size_t n = x.shape(0), size = static_cast<size_t>(s.window_row_bytes());
  need(x.shape(1) == static_cast<size_t>(s.hidden) && norm.size() == static_cast<size_t>(s.head_dim), "draft_window: x, norm");
  need(capacity >= static_cast<int64_t>(n) && cos.shape(0) == n && sin.shape(0) == n, "draft_window: capacity, cos, sin");
  Stage stage(b);
  AttentionWeights w;
  w.wkv = stage.matrix(wkv);
  w.kv_norm = stage.in(norm);
  const RowRing ring{stage.room<uint8_t>(static_cast<size_t>(capacity) * size), capacity, static_cast<int>(size)};
  FlushSubnormals flush;
  b.backend->draft_window({static_cast<int>(n), position, stage.in(x), &w, stage.rope(cos, sin), ring});
  stage.finish();
  return stage.take(ring.base, {static_cast<size_t>(capacity), size});
}

// context_rows[j] belongs to position `first` + j and lies in a ring of `capacity` rows; the block is a ring of its size.
Out<float> draft_attend(Bench& b, int64_t first, const Floats3& q, const Bytes2& context_rows, const Bytes2& block_rows, const Floats1& sink,
                        const Floats2& cos, const Floats2& sin, int64_t capacity) {
  const Shape& s = b.shape;
  const size_t n = q.shape(0), size = static_cast<size_t>(s.window_row_bytes());
  need(q.shape(1) == static_cast<size_t>(s.n_heads) && q.shape(2) == static_cast<size_t>(s.head_dim), "draft_attend: q [n, heads, head_dim]");
  need(context_rows.shape(1) == size && block_rows.shape(1) == size && block_rows.shape(0) == n, "draft_attend: packed rows");
  const int64_t n_context = static_cast<int64_t>(context_rows.shape(0));
  need(n_context <= s.window && capacity >= n_context && capacity > 0, "draft_attend: at most `window` context rows");
  need(cos.shape(0) == n && sin.shape(0) == n && sink.size() == q.shape(1), "draft_attend: cos, sin, sink");
  Stage stage(b);
  const int64_t position = first + n_context;
  const RowRing window{stage.room<uint8_t>(static_cast<size_t>(capacity) * size), capacity, static_cast<int>(size)};
  const RowRing block{stage.room<uint8_t>(n * size), static_cast<int64_t>(n), static_cast<int>(size)};
  for (int64_t j = 0; j < n_context; ++j) std::memcpy(window.row(first + j), context_rows.data() + j * static_cast<int64_t>(size), size);
  for (int64_t j = 0; j < static_cast<int64_t>(n); ++j)
    std::memcpy(block.row(position + j), block_rows.data() + j * static_cast<int64_t>(size), size);
  float* o = stage.room<float>(q.size());
  FlushSubnormals flush;
  b.backend->draft_attend({static_cast<int>(n), position, first, stage.in(q), window, block, stage.in(sink), stage.rope(cos, sin), o});
  stage.finish();
  return stage.take(o, {n, q.shape(1), q.shape(2)});
}

// logits, confidence, probability of the likeliest token
nb::tuple markov(Bench& b, int32_t previous, const nb::tuple& embed, const nb::tuple& head, const nb::tuple& confidence, const Floats1& x,
                 const Floats1& base) {
  const Shape& s = b.shape;
  Stage stage(b);
  const Matrix e = stage.matrix(embed), h = stage.matrix(head), c = stage.matrix(confidence);
  need(x.size() == static_cast<size_t>(s.hidden) && base.size() == static_cast<size_t>(s.vocab) && h.rows == s.vocab && h.cols == e.cols &&
           c.cols == s.hidden + e.cols && previous >= 0 && previous < e.rows,
       "markov: shapes");
  float* logits = stage.room<float>(base.size());
  float* signals = stage.room<float>(1);
  float* top = stage.room<float>(1);
  FlushSubnormals flush;
  b.backend->markov({previous, &e, &h, &c, stage.in(x), stage.in(base), logits, signals, top});
  stage.finish();
  return nb::make_tuple(stage.take(logits, {base.size()}), stage.take(signals, {1}), stage.take(top, {1}));
}

}  // namespace

void bind_draft_ops(nb::class_<Bench>& bench) {
  bench
      .def("index_query", &index_query, nb::arg("qr"), nb::arg("x"), nb::arg("wq_b"), nb::arg("weights_proj"), nb::arg("cos"), nb::arg("sin"))
      .def("stream_mean", &stream_mean, nb::arg("stream"), nb::arg("stride"))
      .def("collapse", &collapse, nb::arg("stream"), nb::arg("mix"))
      .def("draft_main", &draft_main, nb::arg("main"), nb::arg("w"), nb::arg("norm"))
      .def("draft_window", &draft_window, nb::arg("position"), nb::arg("x"), nb::arg("wkv"), nb::arg("norm"), nb::arg("cos"), nb::arg("sin"),
           nb::arg("capacity"))
      .def("draft_attend", &draft_attend, nb::arg("first"), nb::arg("q"), nb::arg("context_rows"), nb::arg("block_rows"), nb::arg("sink"),
           nb::arg("cos"), nb::arg("sin"), nb::arg("capacity"))
      .def("markov", &markov, nb::arg("previous"), nb::arg("embed"), nb::arg("head"), nb::arg("confidence"), nb::arg("x"), nb::arg("base"));
}

}  // namespace ds4::py
