// How many rows an operation takes at a time when what it makes in between is many times wider than a row.
#pragma once

#include <cstdint>

namespace ds4::cpu {

// What the routed experts have of each of two areas: numbers of a task's rows of one expert (cpu/moe.cpp).
constexpr int kMoeArea = 8192;
constexpr int moe_area(bool matrix, int batch) { return matrix ? 128 * batch : kMoeArea; }

constexpr int64_t kSliceRows = 192;  // twice what one task of a product takes: weights are decoded no more often

}  // namespace ds4::cpu
