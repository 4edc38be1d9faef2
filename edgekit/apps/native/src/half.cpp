#include "half.h"

#include <cstring>

namespace edgekit {
namespace {

float as_float(uint32_t bits) {
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

uint32_t as_bits(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  return bits;
}

constexpr uint32_t kInfinity = 0x7f800000, kHalfInfinity = 0x7c00;

}  // namespace

float from_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, magnitude = half & 0x7fffu;
  if (magnitude >= kHalfInfinity) return as_float(sign | kInfinity | (magnitude & 0x3ff) << 13);
  // The exponents differ by 112; the product is exact, for subnormal numbers too.
  return as_float(sign | as_bits(as_float(magnitude << 13) * 0x1p112f));
}

uint16_t to_half(float number) {
  const uint32_t bits = as_bits(number), magnitude = bits & 0x7fffffff;
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  if (magnitude > kInfinity) return sign | 0x7e00;
  if (magnitude >= 0x477ff000) return sign | kHalfInfinity;  // rounds beyond the largest
  if (magnitude < 0x38800000) {                              // subnormal: the sum rounds to the last bit of a half
    return static_cast<uint16_t>(sign | (as_bits(as_float(magnitude) + 0.5f) - as_bits(0.5f)));
  }
  return static_cast<uint16_t>(sign | (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

}  // namespace edgekit
