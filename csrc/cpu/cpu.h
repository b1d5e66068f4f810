// The CPU back ends that this build holds, and the choice among them at run time.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/threads.h"
#include "cpu/matrix.h"
#include "cpu/ops.h"
#include "engine/backend.h"

namespace ds4::cpu {

// Instruction sets that were built and that this machine has, best first ("avx512", "avx2", "neon", "plain").
std::vector<std::string> available_isas();

// isa: one of available_isas(), or "auto". The shape must outlive the back end.
std::unique_ptr<Backend> make_backend(const std::string& isa, const Shape& shape, Activations activations,
                                      ThreadPool& pool);

const Ops& ops(const std::string& isa);

// Bytes that the operations of a back end need at most for runs of `rows` up to `context` tokens, beside alloc(); none
// for 0 threads. matrix: prompts are computed in that class.
int64_t working_bytes(const Shape& shape, int64_t rows, int64_t context, int n_threads, bool matrix);
// The same for a drafter's, which computes blocks, and fills its windows with so many captured rows at a time.
int64_t draft_working_bytes(const Shape& shape, const DrafterWeights& weights, int64_t block, int64_t captured, int n_threads);
// The products of the matrix class: the native ones where the processor has them.
const MatrixClass& matrix_class(const std::string& isa);
// Why there is no fast matrix class; empty where there is.
std::string matrix_missing(const std::string& isa);

}  // namespace ds4::cpu
