// Bits of the row operations of every instruction set of a build against the plain one, as a program of its own: it
// can run where Python cannot, such as an ARM build under an emulator (tests/cpp/arm_under_qemu.sh).
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/cpu.h"
#include "engine/builder.h"

namespace {

uint64_t state = 88172645463325252ull;
uint32_t next_u32() {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return static_cast<uint32_t>(state >> 16);
}
float next_float() { return static_cast<float>(static_cast<int32_t>(next_u32())) * 4.656612873077393e-10f * 4.0f; }

std::vector<float> floats(size_t n) {
  std::vector<float> v(n);
  for (float& x : v) x = next_float();
  return v;
}

int failures = 0;

void same(const std::string& isa, const char* what, const std::vector<float>& a, const std::vector<float>& b) {
  if (std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0) return;
  ++failures;
  std::printf("%s differs from plain in %s\n", isa.c_str(), what);
}

// Random bytes that hold no NaN codes and no absurd scales.
std::vector<uint8_t> weight_bytes(ds4::RowType type, int64_t n) {
  std::vector<uint8_t> v(static_cast<size_t>(n));
  for (auto& b : v) b = static_cast<uint8_t>(next_u32());
  if (type == ds4::RowType::f32 || type == ds4::RowType::bf16 || type == ds4::RowType::f16) {
    const size_t width = type == ds4::RowType::f32 ? 4 : 2;
    for (size_t i = width - 1; i < v.size(); i += width) v[i] = static_cast<uint8_t>((v[i] & 0x80) | 0x3c);
  } else {
    for (auto& b : v)
      if ((b & 0x7f) == 0x7f) b ^= 1;
  }
  return v;
}

void scale_halves(std::vector<uint8_t>& v, size_t block, std::initializer_list<size_t> at) {
  for (size_t i = 0; i + block <= v.size(); i += block)
    for (size_t o : at) v[i + o + 1] = static_cast<uint8_t>((v[i + o + 1] & 0x83) | 0x1c);
}

void check_products(const std::string& isa, const ds4::cpu::Ops& ops, const ds4::cpu::Ops& plain) {
  const char* const types[] = {"f32", "f16", "bf16", "fp8_block", "fp8_row", "fp4_row", "q8_0", "q4_k", "mxfp4", "q2_k"};
  for (const char* name : types)
    for (int cols : {256, 2304, 5120}) {
      ds4::Matrix m;
      m.type = ds4::parse_row_type(name);
      m.rows = 37;
      m.cols = cols;
      m.row_bytes = ds4::row_bytes(m.type, cols);
      m.scale_row_bytes = ds4::scale_row_bytes(m.type, cols);
      auto data = weight_bytes(m.type, m.row_bytes * m.rows);
      if (m.type == ds4::RowType::q8_0) scale_halves(data, 34, {0});
      if (m.type == ds4::RowType::q4_k) scale_halves(data, 144, {0, 2});
      if (m.type == ds4::RowType::q2_k) scale_halves(data, 84, {80, 82});
      if (m.type == ds4::RowType::mxfp4)
        for (size_t i = 0; i < data.size(); i += 17) data[i] = 120;
      std::vector<uint8_t> scale(static_cast<size_t>(m.scale_row_bytes * m.rows));
      for (auto& b : scale) b = static_cast<uint8_t>(118 + next_u32() % 12);
      m.data = data.data();
      m.scale = scale.empty() ? nullptr : scale.data();
      for (int n : {1, 3, 7}) {
        const auto x = floats(static_cast<size_t>(n) * cols);
        std::vector<float> a(static_cast<size_t>(n) * m.rows), b(a.size());
        std::vector<float> sa(ops.product_scratch(cols)), sb(plain.product_scratch(cols));
        ops.product(m, x.data(), n, a.data(), sa.data());
        plain.product(m, x.data(), n, b.data(), sb.data());
        same(isa, name, a, b);
      }
    }
}

void check_rows(const std::string& isa, const ds4::cpu::Ops& ops, const ds4::cpu::Ops& plain) {
  using ds4::cpu::RowFormat;
  for (int kind = 0; kind < 8; ++kind) {
    auto x = floats(4097);
    if (kind == 1 || kind == 7)
      for (float& v : x) v = v < 0 ? -v : v;
    std::vector<float> a(x.size()), b(x.size());
    ops.unary(static_cast<ds4::cpu::Unary>(kind), x.data(), static_cast<int64_t>(x.size()), a.data());
    plain.unary(static_cast<ds4::cpu::Unary>(kind), x.data(), static_cast<int64_t>(x.size()), b.data());
    same(isa, "an elementary function", a, b);
  }
  for (RowFormat f : {RowFormat::window, RowFormat::compressed, RowFormat::index}) {
    const auto x = floats(512);
    std::vector<uint8_t> ra(1024), rb(1024);
    ops.pack(f, x.data(), 512, ra.data());
    plain.pack(f, x.data(), 512, rb.data());
    std::vector<float> a(512), b(512);
    ops.unpack(f, ra.data(), 512, a.data());
    plain.unpack(f, rb.data(), 512, b.data());
    if (ra != rb) ++failures, std::printf("%s differs from plain in a packed row\n", isa.c_str());
    same(isa, "an unpacked row", a, b);
  }
  const auto x = floats(1280), w = floats(1280);
  std::vector<float> a(1280), b(1280);
  ops.norm(x.data(), w.data(), 1280, 1e-20f, true, a.data());
  plain.norm(x.data(), w.data(), 1280, 1e-20f, true, b.data());
  same(isa, "a norm", a, b);
  const auto z = floats(24), scale = floats(3), base = floats(24);
  std::vector<float> ca(24), cb(24);
  ops.hc_coefficients(z.data(), scale.data(), base.data(), 4, 20, 1e-6f, ca.data(), ca.data() + 4, ca.data() + 8);
  plain.hc_coefficients(z.data(), scale.data(), base.data(), 4, 20, 1e-6f, cb.data(), cb.data() + 4, cb.data() + 8);
  same(isa, "the mixing coefficients", ca, cb);
}

}  // namespace

int main() {
  const ds4::FlushSubnormals flush;
  const auto& plain = ds4::cpu::ops("plain");
  for (const auto& isa : ds4::cpu::available_isas()) {
    if (isa == "plain") continue;
    check_products(isa, ds4::cpu::ops(isa), plain);
    check_rows(isa, ds4::cpu::ops(isa), plain);
    std::printf("%s compared with plain\n", isa.c_str());
  }
  std::printf("%d differences\n", failures);
  return failures == 0 ? 0 : 1;
}
