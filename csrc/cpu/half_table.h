// Every half float as f32: a scale that stands alone is cheaper to look up than to convert, because the look-up needs
// no arithmetic port. 256 KB, of which a matrix uses the few kilobytes around its usual scale.
#pragma once

namespace ds4::cpu {

// 65,536 entries, made at the first call.
const float* half_table();

}  // namespace ds4::cpu
