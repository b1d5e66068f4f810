// XXH64 (the published 64-bit xxHash), the checksum of stored payloads; several spans may be fed one after the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ds4 {

// Takes n stripes of 32 bytes into the four sums: nearly all of the work.
void xxh64_stripes(uint64_t* sums, const uint8_t* data, size_t n);

class Xxh64 {
 public:
  explicit Xxh64(uint64_t seed = 0) : seed_(seed), v_{seed + kP1 + kP2, seed + kP2, seed, seed - kP1} {}

  void add(const void* data, size_t n) {
    const auto* p = static_cast<const uint8_t*>(data);
    total_ += n;
    if (held_ > 0) {
      const size_t take = n < 32 - held_ ? n : 32 - held_;
      std::memcpy(hold_ + held_, p, take);
      held_ += take;
      p += take;
      n -= take;
      if (held_ < 32) return;
      xxh64_stripes(v_, hold_, 1);
      held_ = 0;
    }
    const size_t whole = n / 32;
    xxh64_stripes(v_, p, whole);
    p += 32 * whole;
    n -= 32 * whole;
    std::memcpy(hold_, p, n);
    held_ = n;
  }

  static constexpr uint64_t kP1 = 0x9E3779B185EBCA87u, kP2 = 0xC2B2AE3D27D4EB4Fu, kP3 = 0x165667B19E3779F9u,
                            kP4 = 0x85EBCA77C2B2AE63u, kP5 = 0x27D4EB2F165667C5u;

  uint64_t value() const {
    uint64_t h = seed_ + kP5;
    if (total_ >= 32) {
      h = rotl(v_[0], 1) + rotl(v_[1], 7) + rotl(v_[2], 12) + rotl(v_[3], 18);
      for (const uint64_t v : v_) h = (h ^ round(0, v)) * kP1 + kP4;
    }
    h += total_;
    size_t i = 0;
    for (; i + 8 <= held_; i += 8) h = rotl(h ^ round(0, load<uint64_t>(hold_ + i)), 27) * kP1 + kP4;
    if (i + 4 <= held_) {
      h = rotl(h ^ (load<uint32_t>(hold_ + i) * kP1), 23) * kP2 + kP3;
      i += 4;
    }
    for (; i < held_; ++i) h = rotl(h ^ (hold_[i] * kP5), 11) * kP1;
    h = (h ^ (h >> 33)) * kP2;
    h = (h ^ (h >> 29)) * kP3;
    return h ^ (h >> 32);
  }

 private:
  static uint64_t rotl(uint64_t x, int r) { return (x << r) | (x >> (64 - r)); }
  static uint64_t round(uint64_t acc, uint64_t word) { return rotl(acc + word * kP2, 31) * kP1; }
  template <class T>
  static T load(const uint8_t* p) {  // little-endian machines only, as everything here
    T x;
    std::memcpy(&x, p, sizeof(T));
    return x;
  }

  uint64_t seed_, v_[4];
  uint64_t total_ = 0;
  uint8_t hold_[32];
  size_t held_ = 0;
};

}  // namespace ds4
