// The gated unit of an expert's middle elements.
#pragma once

// silu(min(gate, limit)) * clamp(up). In this form NaN stays NaN.
KERNEL_INLINE float swiglu(float gate, float up, float limit) {
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : (up < -limit ? -limit : up);
  return ds4_silu(gate) * up;
}
