// Kernels with one fault each: the stand-in has to find it. Line comments say what is wrong.
#include "compat.h"

kernel void planted_no_barrier(device const uint* in [[buffer(0)]],
                               device uint* out [[buffer(1)]],
                               threadgroup uint* scratch [[threadgroup(0)]],
                               uint i [[thread_position_in_threadgroup]],
                               uint n [[threads_per_threadgroup]]) {
  scratch[i] = in[i];  // no barrier before others read it
  out[i] = scratch[n - 1u - i];
}

kernel void planted_wrong_memory(device const uint* in [[buffer(0)]],
                                 device uint* out [[buffer(1)]],
                                 threadgroup uint* scratch [[threadgroup(0)]],
                                 uint i [[thread_position_in_threadgroup]],
                                 uint n [[threads_per_threadgroup]]) {
  scratch[i] = in[i];
  threadgroup_barrier(mem_flags::mem_device);  // names the wrong memory
  out[i] = scratch[n - 1u - i];
}

kernel void planted_read_then_write(device const uint* in [[buffer(0)]],
                                    device uint* out [[buffer(1)]],
                                    threadgroup uint* scratch [[threadgroup(0)]],
                                    uint i [[thread_position_in_threadgroup]],
                                    uint n [[threads_per_threadgroup]]) {
  scratch[i] = in[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint v = scratch[n - 1u - i];
  scratch[i] = v + 1u;  // others may still have to read it
  out[i] = v;
}

kernel void planted_write_outside(device const uint* in [[buffer(0)]],
                                  device uint* out [[buffer(1)]],
                                  uint i [[thread_position_in_grid]]) {
  out[i + 1u] = in[i];  // the last one is outside
}

kernel void planted_read_outside(device const uint* in [[buffer(0)]],
                                 device uint* out [[buffer(1)]],
                                 uint i [[thread_position_in_grid]]) {
  out[i] = in[int(i) - 1];  // the first one is outside
}

kernel void planted_local_outside(device uint* out [[buffer(0)]],
                                  threadgroup uint* scratch [[threadgroup(0)]],
                                  uint i [[thread_position_in_threadgroup]]) {
  scratch[i + 1u] = i;  // the last one is outside
  out[i] = i;
}

kernel void planted_unwritten(device uint* out [[buffer(0)]],
                              threadgroup uint* scratch [[threadgroup(0)]],
                              uint i [[thread_position_in_threadgroup]]) {
  if (i != 3u) scratch[i] = i;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = scratch[i];  // nobody wrote number 3
}

kernel void planted_groups_collide(device uint* out [[buffer(0)]], uint i [[thread_position_in_threadgroup]]) {
  out[i] = i;  // every threadgroup writes there
}

kernel void planted_no_simd_barrier(device uint* out [[buffer(0)]],
                                    threadgroup uint* scratch [[threadgroup(0)]],
                                    uint i [[thread_position_in_threadgroup]]) {
  scratch[i] = i;  // lanes do not run in step
  out[i] = scratch[i ^ 1u];
}

kernel void right_simd_barrier(device uint* out [[buffer(0)]],
                               threadgroup uint* scratch [[threadgroup(0)]],
                               uint i [[thread_position_in_threadgroup]]) {
  scratch[i] = i;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = scratch[i ^ 1u];
}

kernel void planted_plain_and_atomic(device atomic_uint* counter [[buffer(0)]],
                                     device uint* plain [[buffer(1)]],
                                     uint i [[thread_position_in_grid]]) {
  atomic_fetch_add_explicit(counter, 1u, memory_order_relaxed);
  if (i == 5u) plain[0] = 7u;  // bound to the same memory
}

kernel void planted_some_at_barrier(device uint* out [[buffer(0)]], uint i [[thread_position_in_threadgroup]]) {
  if (i < 40u) threadgroup_barrier(mem_flags::mem_device);  // the others never come
  out[i] = i;
}

kernel void planted_two_barriers(device uint* out [[buffer(0)]], uint i [[thread_position_in_threadgroup]]) {
  if (i < 32u) {
    threadgroup_barrier(mem_flags::mem_device);
  } else {
    threadgroup_barrier(mem_flags::mem_device);  // another one
  }
  out[i] = i;
}

kernel void planted_early_return(device uint* out [[buffer(0)]], uint i [[thread_position_in_threadgroup]]) {
  if (i == 63u) return;  // before the barrier
  threadgroup_barrier(mem_flags::mem_device);
  out[i] = i;
}

kernel void planted_lanes_apart(device uint* out [[buffer(0)]], uint i [[thread_position_in_threadgroup]]) {
  uint v = i;
  if ((i & 1u) != 0u) v = simd_shuffle_xor(v, 2);  // half of the lanes
  out[i] = v;
}

kernel void planted_two_operations(device uint* out [[buffer(0)]], uint i [[thread_position_in_threadgroup]]) {
  uint v = i;
  if ((i & 1u) != 0u) {
    v = simd_shuffle_xor(v, 2);
  } else {
    v = simd_broadcast(v, 2);  // the other half is elsewhere
  }
  out[i] = v;
}

kernel void right_double(device const uint* in [[buffer(0)]], device uint* out [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  out[i] = 2u * in[i];
}

kernel void planted_writes_constants(device uint* bytes [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  bytes[i] = i;  // wrong when the host sets bytes
}
