#include "attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#define INLINE inline __attribute__((always_inline))

namespace edgekit {
namespace {

constexpr size_t kLine = 64;              // bytes of a line of a cache
constexpr size_t kTogether = 16;          // weights that are added side by side
constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr float kLeastExponent = -87.f;   // e to the power of less is zero
constexpr float kRounding = 12582912;     // 1.5 * 2^23: adding it rounds to whole numbers, to even ones at halves

INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

INLINE float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

namespace plain {

#define TARGET
constexpr size_t kLanes = 8, kPanel = 2 * kLanes;
constexpr int kMostRows = 4;
struct Vector {
  float lanes[kLanes];
};

INLINE Vector load(const float* from) {
  Vector read;
  std::memcpy(read.lanes, from, sizeof read.lanes);
  return read;
}
INLINE void store(float* to, const Vector& value) { std::memcpy(to, value.lanes, sizeof value.lanes); }
INLINE Vector all(float value) {
  Vector made;
  std::fill(made.lanes, made.lanes + kLanes, value);
  return made;
}
INLINE Vector larger(Vector a, const Vector& b) {  // b where a is NaN
  for (size_t i = 0; i < kLanes; i++) a.lanes[i] = a.lanes[i] > b.lanes[i] ? a.lanes[i] : b.lanes[i];
  return a;
}
INLINE Vector add_product(Vector sum, const Vector& a, const Vector& b) {
  for (size_t i = 0; i < kLanes; i++) sum.lanes[i] = std::fma(a.lanes[i], b.lanes[i], sum.lanes[i]);
  return sum;
}
INLINE Vector scaled(Vector a, const Vector& b) {
  for (size_t i = 0; i < kLanes; i++) a.lanes[i] *= b.lanes[i];
  return a;
}
INLINE float largest_lane(Vector value) {  // lanes in halves, as sums of them
  for (size_t half = kLanes / 2; half; half /= 2)
    for (size_t i = 0; i < half; i++) value.lanes[i] = std::max(value.lanes[i], value.lanes[i + half]);
  return value.lanes[0];
}
INLINE float sum_of_lanes(Vector value) {
  for (size_t half = kLanes / 2; half; half /= 2)
    for (size_t i = 0; i < half; i++) value.lanes[i] += value.lanes[i + half];
  return value.lanes[0];
}

INLINE float number(float value, float) { return value; }
INLINE float number(int8_t value, float step) { return static_cast<float>(value) * step; }
INLINE float number(uint16_t half, float) {
  if ((half & 0x7c00) == 0x7c00) return float_of((half & 0x8000u) << 16 | 0x7f800000u | (half & 0x3ffu) << 13);
  return float_of((half & 0x8000u) << 16 | (half & 0x7fffu) << 13) * 0x1p112f;  // exponents begin elsewhere
}

template <typename Element>
void store_four(const Element* from, const float* steps, float* to) {
  for (int i = 0; i < 4; i++) to[i] = number(from[i], steps ? steps[i] : 1);
}
template <typename Element>
void turn_four(const Element* const* rows, const float* steps, size_t at, float* to, size_t stride) {
  for (size_t i = 0; i < kLanes; i++)
    for (size_t e = 0; e < 4; e++) to[e * stride + i] = number(rows[i][at + e], steps ? steps[e] : 1);
}
INLINE void halve_four(const float* from, uint16_t* to) {
  for (int i = 0; i < 4; i++) {
    const uint32_t sign = bits_of(from[i]) >> 16 & 0x8000;
    const float size = std::fabs(from[i]);
    uint32_t half;
    if (!(size < 65520)) {
      half = size > 0 ? 0x7c00 : 0x7e00;  // NaN is not larger
    } else if (size < 0x1p-14f) {
      half = bits_of(size + 0.5f) - bits_of(0.5f);  // the sum rounds to the steps of 2^-24
    } else {
      half = (bits_of(size) + 0xfff + (bits_of(size) >> 13 & 1) - (112u << 23)) >> 13;
    }
    to[i] = static_cast<uint16_t>(sign | half);
  }
}
#include "attention_path.h"
#undef TARGET

}  // namespace plain

#if defined(__x86_64__)

namespace avx2 {

#define TARGET __attribute__((target("avx2,fma,f16c")))
constexpr size_t kLanes = 8, kPanel = 2 * kLanes;
constexpr int kMostRows = 6;
using Vector = __m256;

TARGET INLINE Vector load(const float* from) { return _mm256_loadu_ps(from); }
TARGET INLINE void store(float* to, Vector value) { _mm256_storeu_ps(to, value); }
TARGET INLINE Vector all(float value) { return _mm256_set1_ps(value); }
TARGET INLINE Vector larger(Vector a, Vector b) { return _mm256_max_ps(a, b); }
TARGET INLINE Vector add_product(Vector sum, Vector a, Vector b) { return _mm256_fmadd_ps(a, b, sum); }
TARGET INLINE Vector scaled(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
TARGET INLINE float largest_lane(Vector value) {
  const __m128 four = _mm_max_ps(_mm256_extractf128_ps(value, 1), _mm256_castps256_ps128(value));
  const __m128 two = _mm_max_ps(_mm_movehl_ps(four, four), four);
  return _mm_cvtss_f32(_mm_max_ss(_mm_movehdup_ps(two), two));
}
TARGET INLINE float sum_of_lanes(Vector value) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

TARGET INLINE __m128 four(const float* from, const float*) { return _mm_loadu_ps(from); }
TARGET INLINE __m128 four(const uint16_t* from, const float*) {
  return _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}
TARGET INLINE __m128 four(const int8_t* from, const float* steps) {
  int32_t bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return _mm_mul_ps(_mm_cvtepi32_ps(_mm_cvtepi8_epi32(_mm_cvtsi32_si128(bytes))), _mm_loadu_ps(steps));
}
template <typename Element>
TARGET INLINE void store_four(const Element* from, const float* steps, float* to) {
  _mm_storeu_ps(to, four(from, steps));
}
template <typename Element>
TARGET INLINE void turn_four(const Element* const* rows, const float* steps, size_t at, float* to, size_t stride) {
  __m256 read[4];
  for (int i = 0; i < 4; i++)
    read[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(four(rows[i] + at, steps)), four(rows[i + 4] + at, steps), 1);
  const __m256 low = _mm256_unpacklo_ps(read[0], read[1]), next_low = _mm256_unpacklo_ps(read[2], read[3]);
  const __m256 high = _mm256_unpackhi_ps(read[0], read[1]), next_high = _mm256_unpackhi_ps(read[2], read[3]);
  store(to, _mm256_shuffle_ps(low, next_low, 0x44));
  store(to + stride, _mm256_shuffle_ps(low, next_low, 0xee));
  store(to + 2 * stride, _mm256_shuffle_ps(high, next_high, 0x44));
  store(to + 3 * stride, _mm256_shuffle_ps(high, next_high, 0xee));
}
TARGET INLINE void halve_four(const float* from, uint16_t* to) {
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_cvtps_ph(_mm_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT));
}
#include "attention_path.h"
#undef TARGET

}  // namespace avx2

namespace avx512 {

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx2,fma,f16c,prefer-vector-width=512")))
constexpr size_t kLanes = 16, kPanel = 2 * kLanes;
constexpr int kMostRows = 12;
using Vector = __m512;

TARGET INLINE Vector load(const float* from) { return _mm512_loadu_ps(from); }
TARGET INLINE void store(float* to, Vector value) { _mm512_storeu_ps(to, value); }
TARGET INLINE Vector all(float value) { return _mm512_set1_ps(value); }
TARGET INLINE Vector larger(Vector a, Vector b) { return _mm512_max_ps(a, b); }
TARGET INLINE Vector add_product(Vector sum, Vector a, Vector b) { return _mm512_fmadd_ps(a, b, sum); }
TARGET INLINE Vector scaled(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
TARGET INLINE __m256 upper(Vector value) {
  return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(value), 1));
}
TARGET INLINE float largest_lane(Vector value) {
  return avx2::largest_lane(_mm256_max_ps(upper(value), _mm512_castps512_ps256(value)));
}
TARGET INLINE float sum_of_lanes(Vector value) {
  return avx2::sum_of_lanes(_mm256_add_ps(_mm512_castps512_ps256(value), upper(value)));
}

using avx2::four;
using avx2::halve_four;
using avx2::store_four;
template <typename Element>
TARGET INLINE void turn_four(const Element* const* rows, const float* steps, size_t at, float* to, size_t stride) {
  __m512 read[4];
  for (int i = 0; i < 4; i++) {
    read[i] = _mm512_castps128_ps512(four(rows[i] + at, steps));
    read[i] = _mm512_insertf32x4(read[i], four(rows[i + 4] + at, steps), 1);
    read[i] = _mm512_insertf32x4(read[i], four(rows[i + 8] + at, steps), 2);
    read[i] = _mm512_insertf32x4(read[i], four(rows[i + 12] + at, steps), 3);
  }
  const __m512 low = _mm512_unpacklo_ps(read[0], read[1]), next_low = _mm512_unpacklo_ps(read[2], read[3]);
  const __m512 high = _mm512_unpackhi_ps(read[0], read[1]), next_high = _mm512_unpackhi_ps(read[2], read[3]);
  store(to, _mm512_shuffle_ps(low, next_low, 0x44));
  store(to + stride, _mm512_shuffle_ps(low, next_low, 0xee));
  store(to + 2 * stride, _mm512_shuffle_ps(high, next_high, 0x44));
  store(to + 3 * stride, _mm512_shuffle_ps(high, next_high, 0xee));
}
#include "attention_path.h"
#undef TARGET

}  // namespace avx512
#endif

}  // namespace

const AttentionPath& attention_path(const char* product_path) {
#if defined(__x86_64__)
  if (std::strncmp(product_path, "avx512", 6) == 0) return avx512::kPath;
  if (std::strncmp(product_path, "avx", 3) == 0) return avx2::kPath;
#endif
  return plain::kPath;
}

}  // namespace edgekit
