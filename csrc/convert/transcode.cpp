#include "transcode.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <functional>
#include <system_error>
#include <thread>
#include <vector>

namespace ds4::convert {
namespace {

// Runs work(share, first, last) on contiguous shares of the rows. The fault of the lowest row wins, whatever thread
// found it first.
void for_row_shares(std::size_t rows, int n_threads,
                    const std::function<void(std::size_t, std::size_t, std::size_t)>& work) {
  const std::size_t n =
      std::clamp<std::size_t>(static_cast<std::size_t>(std::max(1, n_threads)), 1, std::max<std::size_t>(rows, 1));
  std::vector<std::exception_ptr> faults(n);
  const auto share = [&](std::size_t index) noexcept {
    try {
      work(index, rows * index / n, rows * (index + 1) / n);
    } catch (...) {
      faults[index] = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(n - 1);
  for (std::size_t index = 1; index < n; ++index) {
    try {
      threads.emplace_back(share, index);
    } catch (const std::system_error&) {  // no more threads to be had: do the share here
      share(index);
    }
  }
  share(0);
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& fault : faults) {
    if (fault) std::rethrow_exception(fault);
  }
}

void refuse_non_finite(const float* row, std::size_t cols, std::size_t index) {
  // x - x is zero exactly for finite x; the sum is NaN when any value is not.
  float probe = 0.0f;
  for (std::size_t i = 0; i < cols; ++i) probe += row[i] - row[i];
  if (probe == 0.0f) return;
  for (std::size_t i = 0; i < cols; ++i) {
    if (!std::isfinite(row[i])) throw ConvertFault(index, i, std::isnan(row[i]) ? "NaN" : "infinity");
  }
}

[[noreturn]] void refuse_overflow(const float* row, std::size_t cols, std::size_t index, const char* what) {
  std::size_t worst = 0;
  for (std::size_t i = 1; i < cols; ++i) {
    if (std::fabs(row[i]) > std::fabs(row[worst])) worst = i;
  }
  throw ConvertFault(index, worst, "value " + std::to_string(row[worst]) + " is too large for " + what);
}

// Same codes, other order: byte i of a file block holds values i and i + 16, byte i of the source values 2i and 2i + 1.
void repack_fp4_row(const SourceRows& source, std::size_t row, std::uint8_t* out) {
  const std::uint8_t* codes = source.codes + row * (source.cols / 2);
  const std::uint8_t* scales = source.scales + row * (source.cols / 32);
  for (std::size_t block = 0; block < source.cols / 32; ++block, codes += 16, out += 17) {
    if (scales[block] == 255) throw ConvertFault(row, block * 32, "NaN scale");
    out[0] = scales[block];
    for (std::size_t i = 0; i < 8; ++i) {
      const std::uint8_t low = codes[i], high = codes[i + 8];
      out[1 + 2 * i] = static_cast<std::uint8_t>((low & 15u) | (high << 4));
      out[2 + 2 * i] = static_cast<std::uint8_t>((low >> 4) | (high & 0xf0u));
    }
  }
}

std::size_t encode_row(const float* row, std::size_t cols, std::size_t index, RowType type, Q4kMode mode,
                       std::uint8_t* out) {
  std::size_t n_inexact = 0;
  bool stored = true;
  const char* name = "";
  switch (type) {
    case RowType::f32:
      if (out != nullptr) std::memcpy(out, row, 4 * cols);
      break;
    case RowType::f16:
      stored = encode_f16(row, cols, out, n_inexact);
      name = "F16";
      break;
    case RowType::bf16:
      stored = encode_bf16(row, cols, out, n_inexact);
      name = "BF16";
      break;
    case RowType::q8_0:
      stored = encode_q8_0(row, cols, out);
      name = "Q8_0";
      break;
    case RowType::q4_k:
      stored = encode_q4_k(row, cols, mode, out);
      name = "Q4_K";
      break;
    case RowType::mxfp4:
      stored = encode_mxfp4(row, cols, out);
      name = "MXFP4";
      break;
  }
  if (!stored) refuse_overflow(row, cols, index, name);
  return n_inexact;
}

bool counts_only(RowType type) { return type == RowType::f32 || type == RowType::f16 || type == RowType::bf16; }

}  // namespace

std::size_t transcode(const SourceRows& source, RowType type, Q4kMode mode, std::uint8_t* out, int n_threads) {
  const std::size_t bytes = row_bytes(type, source.cols);
  std::vector<std::size_t> inexact(static_cast<std::size_t>(std::max(1, n_threads)), 0);
  const bool repack = type == RowType::mxfp4 && source.type == SourceType::fp4_row32;
  const bool encode = out != nullptr || counts_only(type);
  for_row_shares(source.rows, n_threads, [&](std::size_t share, std::size_t first, std::size_t last) {
    std::vector<float> values(repack ? 0 : source.cols);
    for (std::size_t row = first; row < last; ++row) {
      std::uint8_t* target = out == nullptr ? nullptr : out + row * bytes;
      if (repack && target != nullptr) {
        repack_fp4_row(source, row, target);
        continue;
      }
      values.resize(source.cols);
      decode_row(source, row, values.data());
      refuse_non_finite(values.data(), source.cols, row);
      if (encode) inexact[share] += encode_row(values.data(), source.cols, row, type, mode, target);
    }
  });
  std::size_t total = 0;
  for (const std::size_t count : inexact) total += count;
  return total;
}

void pack_engram_rows(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t rows, std::size_t dim,
                      std::uint8_t* out, int n_threads) {
  const std::size_t n_scales = dim / 32;
  for_row_shares(rows, n_threads, [&](std::size_t, std::size_t first, std::size_t last) {
    for (std::size_t row = first; row < last; ++row) {
      const std::uint8_t* c = codes + row * dim;
      const std::uint8_t* s = scales + row * n_scales;
      unsigned bad = 0;
      for (std::size_t i = 0; i < dim; ++i) bad |= static_cast<unsigned>((c[i] & 0x7fu) == 0x7fu);
      for (std::size_t i = 0; i < n_scales; ++i) bad |= static_cast<unsigned>(s[i] == 255u);
      if (bad != 0) {
        std::size_t col = 0;
        while (col < dim && (c[col] & 0x7fu) != 0x7fu && s[col / 32] != 255u) ++col;
        throw ConvertFault(row, col, "NaN");
      }
      std::uint8_t* target = out + row * (dim + n_scales);
      std::memcpy(target, c, dim);
      std::memcpy(target + dim, s, n_scales);
    }
  });
}

}  // namespace ds4::convert
