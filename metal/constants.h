// What the host fixes when it makes a pipeline: csrc/metal_host/device.h (Constants) has the same list in the same order.
#pragma once

FUNCTION_CONSTANT(int, fc_type, 0);   // RowType of the matrix (csrc/engine/weights.h)
FUNCTION_CONSTANT(int, fc_rows, 1);   // activation rows of a tile, 1 .. 8
FUNCTION_CONSTANT(int, fc_type2, 2);  // RowType of a second matrix
FUNCTION_CONSTANT(int, fc_flags, 3);  // bits with a meaning of the kernel's own
FUNCTION_CONSTANT(int, fc_round, 4);  // 1: the mode rounds activations to bf16
FUNCTION_CONSTANT(int, fc_quant, 5);  // 1: the mode quantises activations (fp8)

KERNEL_INLINE float rounded(float v) { return fc_round != 0 ? ds4_bf16(v) : v; }
