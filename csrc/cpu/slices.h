// How many rows an operation takes at a time when what it makes in between is many times wider than a row.
#pragma once

#include <cstdint>

namespace ds4::cpu {

constexpr int64_t kSliceRows = 192;  // twice what one task of a product takes: weights are decoded no more often

}  // namespace ds4::cpu
