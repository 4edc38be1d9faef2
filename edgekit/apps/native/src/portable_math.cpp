#include "portable_math.h"

#include <cmath>
#include <cstdint>
#include <cstring>

namespace edgekit {
namespace {

// The operations and the constants of edgekit/runtime/generation/portable_math.py, in its order; change both together.
constexpr double kLn2High = 0x1.62e42fee00000p-1, kLn2Low = 0x1.a39ef35793c76p-33, kLog2E = 0x1.71547652b82fep+0;
constexpr double kLeastExponent = -708.0;
constexpr int64_t kHalfRoot = 0x3fe6a09e667f3bcd;  // the bits of sqrt(1/2)

constexpr double kExp[] = {0x1.af856b53ab212p-26, 0x1.28b02b3801726p-22, 0x1.71dddfe00055bp-19, 0x1.a01996b8efba3p-16,
                           0x1.a01a01bad7e7ap-13, 0x1.6c16c1859704ep-10, 0x1.111111110d65ep-7,  0x1.555555555008dp-5,
                           0x1.5555555555561p-3,  0x1.000000000000bp-1};
constexpr double kLog[] = {0x1.2ef13e6271cd0p-3, 0x1.39a3e569166fdp-3, 0x1.7466274c9392fp-3, 0x1.c71c528a116a9p-3,
                           0x1.249249413b384p-2, 0x1.9999999980d1dp-2, 0x1.555555555558fp-1};

template <class To, class From>
To bits_of(From from) {
  To to;
  static_assert(sizeof to == sizeof from);
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <size_t count>
double polynomial(const double (&coefficients)[count], double x) {
  double result = coefficients[0];
  for (size_t place = 1; place < count; ++place) result = result * x + coefficients[place];
  return result;
}

int64_t shifted(int64_t exponent) { return static_cast<int64_t>(static_cast<uint64_t>(exponent) << 52); }

}  // namespace

double portable_log(double value) {
  const auto bits = bits_of<int64_t>(value);
  const int64_t exponent = (bits - kHalfRoot) >> 52;
  const auto mantissa = bits_of<double>(bits - shifted(exponent));
  const auto scale = static_cast<double>(exponent);
  const double s = (mantissa - 1.0) / (mantissa + 1.0), square = s * s;
  double rest = polynomial(kLog, square) * square * s;
  rest += scale * kLn2Low;
  rest += s + s;
  return rest + scale * kLn2High;
}

double portable_exp(double value) {
  if (value < kLeastExponent) return 0.0;
  const double power = std::floor(value * kLog2E + 0.5);
  const double r = value - power * kLn2High - power * kLn2Low;
  const double result = polynomial(kExp, r) * r * r + r + 1.0;
  return bits_of<double>(bits_of<int64_t>(result) + shifted(static_cast<int64_t>(power)));
}

}  // namespace edgekit
