// linear, linear_split, linear_wide, linear_many: row products of every family, and the activation quantiser.
#include "linear.h"

#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>

#include "base/error.h"
#include "metal_host/backend.h"
#include "metal_host/products.h"

namespace ds4::metal {

LinearParams linear_params(const Matrix& m, int row0, int rows, int n, int64_t x_stride, int64_t ldo) {
  LinearParams args{};
  args.row_bytes = static_cast<uint64_t>(m.row_bytes);
  args.scale_row_bytes = static_cast<uint32_t>(m.scale_row_bytes);
  args.n = static_cast<uint32_t>(n);
  args.rows = static_cast<uint32_t>(rows);
  args.cols = static_cast<uint32_t>(m.cols);
  args.row0 = static_cast<uint32_t>(row0);
  args.x_stride = static_cast<uint32_t>(x_stride);
  args.ldo = static_cast<uint32_t>(ldo);
  args.group_rows = static_cast<uint32_t>(rows);
  return args;
}

namespace {

// Tiles that keep a large GPU at work. With fewer, the smaller pieces of `linear` spread over more of its cores: a tile takes as
// long as its columns however few tiles there are.
constexpr int64_t kEnoughTiles = 64;
// Matrix rows that occupy it: two make a simdgroup's work, and a simdgroup that waits for memory needs others beside it.
constexpr int kEnoughRows = 8192;
// Simdgroups of linear_wide that leave it waiting for memory: each then has more on its way.
constexpr int64_t kFewSimdgroups = 600;

// Activation rows that a kernel is made for (metal/linear.metal).
int made_for(int n) { return n <= 2 ? n : n <= 4 ? 4 : n <= 6 ? 6 : 8; }

#ifdef DS4_CUDA
constexpr bool kWideUnasked = true;
#else
constexpr bool kWideUnasked = false;
#endif

}  // namespace

namespace {

// What a variable of the environment asks for, "always" or "never", for tests and for measurements; nothing without it.
std::optional<bool> asked_for(const char* name) {
  const char* wish = std::getenv(name);
  if (wish == nullptr) return std::nullopt;
  if (std::strcmp(wish, "always") == 0) return true;
  if (std::strcmp(wish, "never") == 0) return false;
  throw OptionError("[metal] " + std::string(name) + ": expected always or never, found '" + std::string(wish).substr(0, 80) + "'");
}

}  // namespace

bool use_tiles(int64_t n, int64_t tiles) {
  if (n <= LINEAR_TILE) return false;
  return asked_for("DS4_METAL_TILES").value_or(tiles >= kEnoughTiles);
}

// Only NVIDIA's GPUs have run these kernels, so only there they are taken unasked.
bool use_wide(RowType type, int64_t cols, int64_t row_bytes, bool aligned) {
  const bool wanted = asked_for("DS4_METAL_WIDE").value_or(kWideUnasked);
  return wanted && wide_pitch(type) > 0 && cols % WIDE_CHUNK == 0 && cols <= int64_t{WIDE_SEGMENTS} * kSegmentColumns && aligned &&
         row_bytes % (type == RowType::mxfp4 ? 8 : 16) == 0;
}

int64_t wide_pitch(RowType type) {
  return type == RowType::q8_0 ? WIDE_PITCH_Q8_0 : type == RowType::q4_k ? WIDE_PITCH_Q4_K : type == RowType::mxfp4 ? WIDE_PITCH_MXFP4 : 0;
}

int64_t wide_stage(RowType type, int64_t rows, int64_t staged, bool deep) {
  return (deep ? WIDE_DEEP_STAGES : WIDE_STAGES) * (WIDE_ROWS_OF(rows) * wide_pitch(type) + staged * WIDE_X);
}

bool device_has(size_t threadgroup_bytes) { return threadgroup_bytes <= Device::get().device()->maxThreadgroupMemoryLength(); }

bool aligned_for(const Matrix& m, const float* x, int64_t x_stride) {
  return reinterpret_cast<uintptr_t>(m.data) % 16 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0 && x_stride % 4 == 0;
}

int tile_flags(int64_t cols) { return cols > kSegmentColumns ? TILE_FOLDS : 0; }

LinearRun linear_run(const Matrix& m, LinearParams& args, int flags, const float* x) {
  const int rows = static_cast<int>(args.rows), n = static_cast<int>(args.n), group_rows = static_cast<int>(args.group_rows);
  LinearRun run{};
  run.constants.type = static_cast<int32_t>(m.type);
  const int64_t of_group = group_rows;
  const int64_t blocks = groups_of(rows, of_group) * groups_of(of_group, TILE_OUTPUTS), tokens = groups_of(n, TILE_TOKENS);
  if (use_tiles(n, blocks * tokens)) {
    run.kernel = "linear_many";
    run.constants.flags = flags | tile_flags(m.cols);
    run.grid = {blocks, tokens};
    run.threads = TILE_THREADS;
    run.threadgroup_bytes = TILE_BYTES;
    return run;
  }
  run.constants.rows = tile_rows(n);
  run.constants.flags = flags;
  const int64_t segments = groups_of(m.cols, kSegmentColumns);
  const bool aligned = aligned_for(m, x + args.x_at, args.x_stride) && args.group_x % 4 == 0 && (group_rows == rows || group_rows % WIDE_ROWS_OF(1) == 0);
  if (use_wide(m.type, m.cols, m.row_bytes, aligned)) {
    const int64_t made = made_for(run.constants.rows), of_tile = WIDE_ROWS_OF(made), sums = 64 * of_tile * made * 4;
    const int64_t staged = made <= WIDE_STAGED_ROWS ? made : 0;
    const bool deep = groups_of(rows, of_tile) * segments <= kFewSimdgroups &&
                      device_has(static_cast<size_t>(segments * (wide_stage(m.type, made, staged, true) + of_tile * made * 4)));
    args.area = static_cast<uint32_t>(std::max(wide_stage(m.type, made, staged, deep), sums));
    const size_t of_one = static_cast<size_t>(segments * args.area + of_tile * made * 4);
    int64_t tiles = WIDE_TILES(static_cast<uint32_t>(segments));
    while (tiles > 1 && !device_has(static_cast<size_t>(tiles) * of_one)) --tiles;
    args.tiles = static_cast<uint32_t>(tiles);
    run.threadgroup_bytes = static_cast<size_t>(tiles) * of_one;
    if (device_has(run.threadgroup_bytes)) {
      run.kernel = "linear_wide";
      run.constants.flags |= deep ? WIDE_DEEP : 0;
      run.grid = {groups_of(rows, tiles * of_tile), groups_of(n, LINEAR_TILE)};
      run.threads = static_cast<int>(tiles * segments) * kLanes;
      return run;
    }
    run.threadgroup_bytes = 0;
  }
  if (rows <= kEnoughRows && segments > 1 && segments <= LINEAR_SPLIT) {
    const int64_t together = LINEAR_SPLIT / segments;
    run.kernel = "linear_split";
    run.grid = {groups_of(rows, together * LINEAR_OUTPUTS), groups_of(n, LINEAR_TILE)};
    run.threads = static_cast<int>(together * segments) * kLanes;
    run.threadgroup_bytes = static_cast<size_t>(together * segments * 64 * LINEAR_OUTPUTS * made_for(tile_rows(n))) * sizeof(float);
    return run;
  }
  constexpr int kPer = LINEAR_OUTPUTS * LINEAR_SIMDGROUPS;
  run.kernel = "linear";
  run.grid = {groups_of(rows, kPer), groups_of(n, LINEAR_TILE)};
  run.threads = LINEAR_SIMDGROUPS * kLanes;
  return run;
}

void MetalBackend::linear(const Product& p, int n) {
  LinearParams args = linear_params(*p.m, p.row0, p.rows, n, p.x_stride, p.ldo);
  if (p.group_rows > 0) {
    args.group_rows = static_cast<uint32_t>(p.group_rows);
    args.group_x = static_cast<uint32_t>(p.group_x);
  }
  const LinearRun run = linear_run(*p.m, args, p.round && round_ ? LINEAR_ROUND : 0, p.x);
  encode(run.kernel, run.constants, args,
         {fixed(p.m->data), fixed(scales(*p.m)), reads(p.x, n * p.x_stride), writes(p.out, (n - 1) * p.ldo + p.rows), absent(), absent(),
          absent(), absent(), absent()},
         run.grid, run.threads, run.threadgroup_bytes);
}

void MetalBackend::linear(const Matrix& m, const float* x, int64_t x_stride, int n, float* out, int64_t ldo, bool round) {
  linear(Product{&m, 0, m.rows, x, x_stride, out, ldo, round}, n);
}

void MetalBackend::quantise(float* x, int64_t stride, int width, int n) {
  if (!quant_) return;
  const QuantiseParams args{static_cast<uint32_t>(stride), static_cast<uint32_t>(width)};
  encode("quantise", {}, args, {updates(x, n * stride)}, Grid{(width + 31) / 32, n}, kLanes);
}

}  // namespace ds4::metal
