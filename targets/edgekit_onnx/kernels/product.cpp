#include "product.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))
#if defined(__linux__) && (__GNUC__ >= 11 || __clang_major__ >= 12)  // Linux gives tiles to programs that ask
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_AMX
#define AMX __attribute__((target("amx-tile,amx-int8,avx512f,avx512bw,avx512vl,avx512vnni")))
#endif
#endif
#define INLINE inline __attribute__((always_inline))

namespace edgekit {
namespace {

constexpr size_t kCached = 1024;       // inputs that are multiplied at once: their weights stay in the first cache
constexpr int kAhead = 8192;             // bytes: weights come from memory, at least 5 ns a line
constexpr float kLeast = 1e-36f;       // a block of smaller activations is zero, since 127 / kLeast must be finite
constexpr float kRounding = 12582912;  // 1.5 * 2^23: adding it rounds to whole numbers, to even ones at halves

INLINE int32_t bits_of(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Plain code, which the compiler turns into the instructions of each path: the same operations and so the same bits.
template <int kBlock>
INLINE void quantise_block(const float* from, int8_t* to, float* scale, float* turned, int32_t* mend, int32_t factor) {
  int32_t most_bits = 0;  // the bits of positive floats have their order, and those of NaN are above all
  for (int i = 0; i < kBlock; i++) most_bits = std::max(most_bits, bits_of(from[i]) & 0x7fffffff);
  float most;
  std::memcpy(&most, &most_bits, sizeof most);
  const bool counts = most >= kLeast, is_finite = most <= std::numeric_limits<float>::max();
  const float inverse = counts ? 127.f / most : 0.f;
  int32_t whole[kBlock], total = 0;
  for (int i = 0; i < kBlock; i++) whole[i] = bits_of(from[i] * inverse + kRounding) - bits_of(kRounding);
  for (int i = 0; i < kBlock; i++) to[i] = static_cast<int8_t>(whole[i]);
  for (int i = 0; i < kBlock; i++) total += whole[i];
  *scale = *turned = !is_finite ? std::numeric_limits<float>::quiet_NaN() : counts ? most / 127.f : 0.f;
  *mend = factor * total;
}

template <int kBlock>
INLINE void quantise_blocks(const float* from, size_t inputs, const Rows& to, int32_t factor) {
  const auto [values, scales, mends, turned, padded, blocks] = to;
  const size_t full = inputs / kBlock;
  for (size_t at = 0; at < full; at++)
    quantise_block<kBlock>(from + at * kBlock, values + at * kBlock, scales + at, turned + at * kTurned, mends + at,
                           factor);
  if (full == blocks) return;
  float last[kBlock] = {};
  std::copy(from + full * kBlock, from + inputs, last);
  quantise_block<kBlock>(last, values + full * kBlock, scales + full, turned + full * kTurned, mends + full, factor);
}

INLINE void quantise_row(const float* from, size_t inputs, int block, const Rows& to, int32_t factor) {
  if (block == 16) quantise_blocks<16>(from, inputs, to, factor);
  if (block == 32) quantise_blocks<32>(from, inputs, to, factor);
  if (block == 64) quantise_blocks<64>(from, inputs, to, factor);
  if (block == 128) quantise_blocks<128>(from, inputs, to, factor);
}

void quantise_plain(const float* from, size_t inputs, int block, const Rows& to, int32_t factor) {
  quantise_row(from, inputs, block, to, factor);
}

INLINE float float_of(uint32_t half) {
  const uint32_t bits = (half & 0x8000) << 16 | (half & 0x7fff) << 13;
  float small;  // 2^112 times too small, since exponents begin elsewhere
  std::memcpy(&small, &bits, sizeof small);
  return small * 0x1p112f;
}

INLINE float scale_plain(const Part& part, size_t place) {
  return part.halves ? float_of(static_cast<const uint16_t*>(part.scales)[place])
                     : static_cast<const float*>(part.scales)[place];
}

INLINE float block_sum(const Rows& rows, size_t row, size_t block, int32_t factor) {
  const size_t place = row * rows.blocks + block;
  return static_cast<float>(rows.mends[place] / factor) * rows.scales[place];
}

void add_offsets_plain(const uint16_t* offsets, const Rows& rows, size_t count, int32_t factor, float* out,
                       size_t stride) {
  for (size_t m = 0; m < count; m++, out += stride)
    for (size_t at = 0; at < rows.blocks; at++) {
      const float sum = block_sum(rows, m, at, factor);
      for (int c = 0; c < kWide; c++) out[c] = std::fma(float_of(offsets[at * kWide + c]), sum, out[c]);
    }
}

template <bool kNibbles>
void multiply_plain(const Part& part, const Rows& rows, size_t count, float* out, size_t stride, bool begins) {
  for (size_t m = 0; m < count; m++, out += stride) {
    float sum[kWide];
    for (int c = 0; c < kWide; c++) sum[c] = begins ? 0.f : out[c];
    const uint8_t* from = part.values;
    for (int at = 0; at < part.blocks; at++) {
      const int8_t* q = rows.values + m * rows.inputs + at * part.block;
      int32_t whole[kWide] = {};
      for (int i = 0; i < part.block; i += 4) {
        const bool is_high = kNibbles && i % 8;
        for (int c = 0; c < kWide; c++)
          for (int b = 0; b < 4; b++) {
            const uint8_t byte = from[c * 4 + b];
            whole[c] += q[i + b] * (kNibbles ? (is_high ? byte >> 4 : byte & 15) : byte);
          }
        if (!kNibbles || is_high) from += kWide * 4;
      }
      const float scale = rows.scales[m * rows.blocks + at];
      const int32_t mend = rows.mends[m * rows.blocks + at];
      for (int c = 0; c < kWide; c++) {
        const int32_t exact = whole[c] + mend * (part.zeros ? part.zeros[at * kWide + c] : 1);
        sum[c] = std::fma(static_cast<float>(exact) * scale_plain(part, at * kWide + c), scale, sum[c]);
      }
    }
    std::copy(sum, sum + kWide, out);
  }
}

// 1 / (1 + e^-x) within rounding, for x from -18 to 18.
INLINE float logistic(float x) {
  const float square = x * x;
  float above = __builtin_fmaf(square, 4.37031012579801e-11f, 1.15627324459942e-07f);
  above = __builtin_fmaf(above, square, 6.08574864600143e-05f);
  above = __builtin_fmaf(above, square, 8.51377133304701e-03f);
  above = __builtin_fmaf(above, square, 2.48287947061529e-01f) * x;
  float below = __builtin_fmaf(square, 6.10247389755681e-13f, 5.76102136993427e-09f);
  below = __builtin_fmaf(below, square, 6.29106785017040e-06f);
  below = __builtin_fmaf(below, square, 1.70198817374094e-03f);
  below = __builtin_fmaf(below, square, 1.16817656904453e-01f);
  below = __builtin_fmaf(below, square, 9.93151921023180e-01f);
  return above / below + 0.5f;
}

// Bounds are loops of their own, since compilers make branches of bounds within one. NaN stays.
INLINE void gate_rows(const float* gates, const float* values, size_t count, float* out, size_t stride) {
  for (size_t m = 0; m < count; m++, gates += kWide, values += kWide, out += stride) {
    float bounded[kWide], shares[kWide];
    for (int c = 0; c < kWide; c++) bounded[c] = gates[c] < -18.f ? -18.f : gates[c];
    for (int c = 0; c < kWide; c++) bounded[c] = bounded[c] > 18.f ? 18.f : bounded[c];
    for (int c = 0; c < kWide; c++) shares[c] = logistic(bounded[c]);
    for (int c = 0; c < kWide; c++) shares[c] = shares[c] < 0.f ? 0.f : shares[c];
    for (int c = 0; c < kWide; c++) shares[c] = shares[c] > 1.f ? 1.f : shares[c];
    for (int c = 0; c < kWide; c++) bounded[c] = gates[c] * shares[c] * values[c];
    std::memcpy(out, bounded, sizeof bounded);
  }
}

void gate_plain(const float* gates, const float* values, size_t count, float* out, size_t stride) {
  gate_rows(gates, values, count, out, stride);
}

constexpr Path kPlain = {"plain", quantise_plain, multiply_plain<true>, multiply_plain<false>, add_offsets_plain, gate_plain};

#if defined(__x86_64__)

AVX2 void quantise_avx2(const float* from, size_t inputs, int block, const Rows& to, int32_t factor) {
  quantise_row(from, inputs, block, to, factor);
}

AVX2 void gate_avx2(const float* gates, const float* values, size_t count, float* out, size_t stride) {
  gate_rows(gates, values, count, out, stride);
}

AVX2 INLINE __m256i four_avx2(const int8_t* from) {
  int32_t four;
  std::memcpy(&four, from, sizeof four);
  return _mm256_set1_epi32(four);
}

AVX2 INLINE __m256 scale_avx2(const Part& part, size_t place) {
  if (!part.halves) return _mm256_loadu_ps(static_cast<const float*>(part.scales) + place);
  const uint16_t* halves = static_cast<const uint16_t*>(part.scales) + place;
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves)));
}

AVX2 void add_offsets_avx2(const uint16_t* offsets, const Rows& rows, size_t count, int32_t factor, float* out,
                           size_t stride) {
  for (size_t m = 0; m < count; m++, out += stride) {
    __m256 total[kWide / 8];
    for (int c = 0; c < kWide / 8; c++) total[c] = _mm256_loadu_ps(out + c * 8);
    for (size_t at = 0; at < rows.blocks; at++) {
      const __m256 sum = _mm256_set1_ps(block_sum(rows, m, at, factor));
      for (int c = 0; c < kWide / 8; c++) {
        const auto* halves = reinterpret_cast<const __m128i*>(offsets + at * kWide + c * 8);
        total[c] = _mm256_fmadd_ps(_mm256_cvtph_ps(_mm_loadu_si128(halves)), sum, total[c]);
      }
    }
    for (int c = 0; c < kWide / 8; c++) _mm256_storeu_ps(out + c * 8, total[c]);
  }
}

// AVX-VNNI's form of the instruction, for which compilers want a target of its own.
AVX2 INLINE __m256i dot_avx2(__m256i sum, __m256i weights, __m256i rows) {
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(weights), "x"(rows));
  return sum;
}

AVX2 INLINE __m256i load_avx2(const uint8_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

// Adds a block's products of R rows and C times 8 outputs in whole numbers; `q` is the first row, `row` their distance.
// Without AVX-VNNI (kDot), pairs are added in 16 bits: these hold them for 32 inputs of 4-bit weights, and of 8-bit
// weights, less 128, for each alone.
template <int R, int C, bool kNibbles, bool kDot>
AVX2 INLINE void block_avx2(const uint8_t* from, const int8_t* q, size_t row, int block, __m256i (&whole)[R][C]) {
  constexpr int step = kWide * 4;
  const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(15), half = _mm256_set1_epi8(-128);
  __m256i pairs[R][C] = {};
  for (int j = 0; j < block; j += 8, from += kNibbles ? step : 2 * step) {
    __m256i first[C], second[C];
    for (int c = 0; c < C; c++) {
      const __m256i read = load_avx2(from + c * 32);
      first[c] = kNibbles ? _mm256_and_si256(read, low) : read;
      second[c] = kNibbles ? _mm256_and_si256(_mm256_srli_epi16(read, 4), low) : load_avx2(from + step + c * 32);
    }
    for (int m = 0; m < R; m++) {
      const __m256i four = four_avx2(q + m * row + j), next = four_avx2(q + m * row + j + 4);
      for (int c = 0; c < C; c++) {
        if constexpr (kDot) {
          whole[m][c] = dot_avx2(dot_avx2(whole[m][c], first[c], four), second[c], next);
        } else if constexpr (kNibbles) {
          pairs[m][c] = _mm256_add_epi16(pairs[m][c], _mm256_maddubs_epi16(first[c], four));
          pairs[m][c] = _mm256_add_epi16(pairs[m][c], _mm256_maddubs_epi16(second[c], next));
        } else {
          for (const auto& [weights, inputs] : {std::pair{first[c], four}, std::pair{second[c], next}}) {
            const __m256i less = _mm256_xor_si256(weights, half);
            const __m256i both = _mm256_maddubs_epi16(_mm256_abs_epi8(less), _mm256_sign_epi8(inputs, less));
            whole[m][c] = _mm256_add_epi32(whole[m][c], _mm256_madd_epi16(both, ones));
          }
        }
      }
    }
    if (kDot || !kNibbles || ((j + 8) % 32 && j + 8 < block)) continue;
    for (int m = 0; m < R; m++)
      for (int c = 0; c < C; c++) {
        whole[m][c] = _mm256_add_epi32(whole[m][c], _mm256_madd_epi16(pairs[m][c], ones));
        pairs[m][c] = _mm256_setzero_si256();
      }
  }
}

template <int R, bool kNibbles, bool kDot>
AVX2 void tile_avx2(const Part& part, const Rows& rows, float* out, size_t stride, bool begins) {
  constexpr int eights = kWide / 8, together = kDot ? 2 : 1;  // registers of 8 outputs
  constexpr bool is_less = !kNibbles && !kDot;                // weights are multiplied less 128
  __m256 sum[R][eights];
  for (int m = 0; m < R; m++)
    for (int c = 0; c < eights; c++)
      sum[m][c] = begins ? _mm256_setzero_ps() : _mm256_loadu_ps(out + m * stride + c * 8);
  for (int at = 0; at < part.blocks; at++) {
    const uint8_t* from = part.values + static_cast<size_t>(at) * part.block * kWide / (kNibbles ? 2 : 1);
    const int8_t* q = rows.values + static_cast<size_t>(at) * part.block;
    for (int c = 0; c < eights; c += together) {
      __m256i whole[R][together] = {};
      block_avx2<R, together, kNibbles, kDot>(from + c * 32, q, rows.inputs, part.block, whole);
      for (int i = 0; i < together; i++) {
        const size_t place = at * kWide + (c + i) * 8;
        const __m256 scale = scale_avx2(part, place);
        for (int m = 0; m < R; m++) {
          __m256i mend = _mm256_set1_epi32(rows.mends[m * rows.blocks + at]);
          if (part.zeros) {
            const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(part.zeros + place));
            const __m256i zeros = _mm256_sub_epi32(_mm256_cvtepu8_epi32(bytes), _mm256_set1_epi32(is_less ? 128 : 0));
            mend = _mm256_mullo_epi32(mend, zeros);
          } else if (is_less) {
            mend = _mm256_setzero_si256();
          }
          const __m256 exact = _mm256_cvtepi32_ps(_mm256_add_epi32(whole[m][i], mend));
          const __m256 row_scale = _mm256_set1_ps(rows.scales[m * rows.blocks + at]);
          sum[m][c + i] = _mm256_fmadd_ps(_mm256_mul_ps(exact, scale), row_scale, sum[m][c + i]);
        }
      }
    }
  }
  for (int m = 0; m < R; m++)
    for (int c = 0; c < eights; c++) _mm256_storeu_ps(out + m * stride + c * 8, sum[m][c]);
}

VNNI void quantise_vnni(const float* from, size_t inputs, int block, const Rows& to, int32_t factor) {
  quantise_row(from, inputs, block, to, factor);
}

VNNI void gate_vnni(const float* gates, const float* values, size_t count, float* out, size_t stride) {
  gate_rows(gates, values, count, out, stride);
}

VNNI INLINE __m512i four_vnni(const int8_t* from) {
  int32_t four;
  std::memcpy(&four, from, sizeof four);
  return _mm512_set1_epi32(four);
}

VNNI INLINE __m512 scale_vnni(const Part& part, size_t place) {
  if (!part.halves) return _mm512_loadu_ps(static_cast<const float*>(part.scales) + place);
  const uint16_t* halves = static_cast<const uint16_t*>(part.scales) + place;
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
}

// Whole numbers with which a block's sum begins: minus zero point times the sum of the activations.
VNNI INLINE __m512i start_vnni(const Part& part, int at, int half, int32_t mend) {
  if (!part.zeros) return _mm512_set1_epi32(mend);
  const uint8_t* zeros = part.zeros + at * kWide + half * 16;
  const __m512i zero = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros)));
  return _mm512_mullo_epi32(zero, _mm512_set1_epi32(mend));
}

// Two registers of 16 outputs. Few rows add each step's two halves apart, as one chain would wait for itself.
template <int R, bool kNibbles>
VNNI void tile_vnni(const Part& part, const Rows& rows, float* out, size_t stride, bool begins) {
  constexpr int chains = R <= 2 ? 2 : 1;
  const __m512i low = _mm512_set1_epi8(15);
  __m512 sum[R][2];
  for (int m = 0; m < R; m++)
    for (int half = 0; half < 2; half++)
      sum[m][half] = begins ? _mm512_setzero_ps() : _mm512_loadu_ps(out + m * stride + half * 16);
  const uint8_t* from = part.values;
  const int8_t* q = rows.values;
  for (int at = 0; at < part.blocks; at++) {
    __m512i whole[chains][R][2];
    for (int m = 0; m < R; m++)
      for (int half = 0; half < 2; half++) {
        whole[chains - 1][m][half] = _mm512_setzero_si512();
        whole[0][m][half] = start_vnni(part, at, half, rows.mends[m * rows.blocks + at]);
      }
    for (int i = 0; i < part.block; i += 8, q += 8) {
      for (int line = 0; line < (kNibbles ? 2 : 4); line++)
        _mm_prefetch(reinterpret_cast<const char*>(from) + kAhead + line * 64, _MM_HINT_T0);
      __m512i step[2][2];  // of 4 inputs each, halves of the outputs
      if constexpr (kNibbles) {
        for (int half = 0; half < 2; half++) {
          const __m512i both = _mm512_loadu_si512(from + half * 64);
          step[0][half] = _mm512_and_si512(both, low);
          step[1][half] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        }
        from += 128;
      } else {
        for (int part_of = 0; part_of < 4; part_of++)
          step[part_of / 2][part_of % 2] = _mm512_loadu_si512(from + part_of * 64);
        from += 256;
      }
#pragma GCC unroll 6
      for (int m = 0; m < R; m++)
#pragma GCC unroll 2
        for (int s = 0; s < 2; s++) {
          const __m512i four = four_vnni(q + m * rows.inputs + s * 4);
          __m512i* to = whole[s % chains][m];
          to[0] = _mm512_dpbusd_epi32(to[0], step[s][0], four);
          to[1] = _mm512_dpbusd_epi32(to[1], step[s][1], four);
        }
    }
    for (int half = 0; half < 2; half++) {
      const __m512 scale = scale_vnni(part, at * kWide + half * 16);
      for (int m = 0; m < R; m++) {
        __m512i exact = whole[0][m][half];
        if (chains == 2) exact = _mm512_add_epi32(exact, whole[1][m][half]);
        const __m512 row_scale = _mm512_set1_ps(rows.scales[m * rows.blocks + at]);
        sum[m][half] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(exact), scale), row_scale, sum[m][half]);
      }
    }
  }
  for (int m = 0; m < R; m++)
    for (int half = 0; half < 2; half++) _mm512_storeu_ps(out + m * stride + half * 16, sum[m][half]);
}

using Tile = void (*)(const Part&, const Rows&, float*, size_t, bool);
template <bool kNibbles, bool kDot>
constexpr Tile kAvx2Tiles[] = {
    tile_avx2<1, kNibbles, kDot>, tile_avx2<2, kNibbles, kDot>, tile_avx2<3, kNibbles, kDot>,
    tile_avx2<4, kNibbles, kDot>, tile_avx2<5, kNibbles, kDot>, tile_avx2<6, kNibbles, kDot>};
template <bool kNibbles>
constexpr Tile kVnniTiles[] = {tile_vnni<1, kNibbles>, tile_vnni<2, kNibbles>, tile_vnni<3, kNibbles>,
                               tile_vnni<4, kNibbles>, tile_vnni<5, kNibbles>, tile_vnni<6, kNibbles>};

// Rows in tiles of nearly equal height, no higher than the registers of a path allow.
template <const Tile* kTiles, size_t kMost>
void multiply_tiles(const Part& part, const Rows& rows, size_t count, float* out, size_t stride, bool begins) {
  size_t done = 0;
  for (size_t tiles = (count + kMost - 1) / kMost; tiles; tiles--) {
    const size_t height = (count - done + tiles - 1) / tiles;
    kTiles[height - 1](part, rows.from(done, 0, 0), out + done * stride, stride, begins);
    done += height;
  }
}

#if defined(HAS_AMX)

// AMX multiplies 16 rows of activations by 16 outputs at once, up to 64 inputs deep. Each block leaves its whole numbers
// in memory for the floats, so blocks of 16 gain nothing.
constexpr int kTileRows = kTurned, kTileBytes = 64;
constexpr int kMostTiled = kCached / 32;  // blocks of a part
struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
struct alignas(64) Whole {
  int32_t products[kTileRows][16];
};

// A part as tiles read it: weights less their middle, in the order of 8-bit weights, and scales as floats.
//
// Among instructions of tiles, floats are added and multiplied at half the speed, and turning whole numbers into floats
// counts as that (measured on Sapphire Rapids). With `is_short` an addition of whole numbers does it: n plus the bits
// of kRounding is the float kRounding + n. A fused product with the scale takes kRounding * scale off again, which is
// exact where the scale's last two bits are zero, and so has the one rounding of n * scale. Only the sign of a zero may
// differ. That changes no sum, unless one is so small that it rounds to -0; larger scales prevent it.
struct alignas(64) Spread {
  int8_t weights[kCached * kWide];
  float scales[kMostTiled * kWide], offsets[kMostTiled * kWide];
  bool is_short = true;
};

template <bool kNibbles>
VNNI INLINE void spread(const Part& part, Spread& to) {
  const __m512i low = _mm512_set1_epi8(15), middle = _mm512_set1_epi8(kNibbles ? 8 : -128);
  const size_t bytes = static_cast<size_t>(part.blocks) * part.block * kWide;
  if constexpr (kNibbles) {
    for (size_t at = 0; at < bytes; at += 256)
      for (int half = 0; half < 128; half += 64) {
        const __m512i both = _mm512_loadu_si512(part.values + at / 2 + half);
        const __m512i first = _mm512_and_si512(both, low), second = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        _mm512_store_si512(to.weights + at + half, _mm512_sub_epi8(first, middle));
        _mm512_store_si512(to.weights + at + 128 + half, _mm512_sub_epi8(second, middle));
      }
  } else {
    for (size_t at = 0; at < bytes; at += 64)
      _mm512_store_si512(to.weights + at, _mm512_xor_si512(_mm512_loadu_si512(part.values + at), middle));
  }
  const __m512 least = _mm512_set1_ps(0x1p-20f), most = _mm512_set1_ps(0x1p100f);
  for (int place = 0; place < part.blocks * kWide; place += 16) {
    const __m512 scale = scale_vnni(part, place), size = _mm512_abs_ps(scale);
    const __mmask16 exact = _mm512_testn_epi32_mask(_mm512_castps_si512(scale), _mm512_set1_epi32(3));
    const __mmask16 usual = _mm512_cmp_ps_mask(size, least, _CMP_GE_OQ) & _mm512_cmp_ps_mask(size, most, _CMP_LE_OQ);
    const __mmask16 zero = _mm512_cmp_ps_mask(size, _mm512_setzero_ps(), _CMP_EQ_OQ);
    to.is_short &= ((exact & usual) | zero) == 0xffff;
    _mm512_store_ps(to.scales + place, scale);
    _mm512_store_ps(to.offsets + place, _mm512_mul_ps(scale, _mm512_set1_ps(-kRounding)));
  }
}

// Registers of tiles are numbers in the text of an instruction: macros, since no argument can be one.
#define MULTIPLY_BLOCK(at, sum, left, right)                                      \
  _tile_zero(sum);                                                                \
  for (int k = 0; k < kBlock; k += kTileBytes) {                                  \
    _tile_loadd(left, values + (at) * kBlock + k, rows.inputs);                   \
    _tile_loadd(right, weights + ((at) * kBlock + k) * kWide, size_t{kWide * 4}); \
    _tile_dpbssd(sum, left, right);                                               \
  }
#define STORE_BLOCK(sum, whole) _tile_stored(sum, (whole).products, sizeof (whole).products[0])

// What a block's whole numbers are multiplied with.
struct Factors {
  const float *scales, *offsets, *row_scales;
};

template <bool kShort>
VNNI INLINE void add_block(const Whole& whole, const Factors& factors, size_t at, __m512 (&sum)[kTileRows]) {
  const __m512 scale = _mm512_load_ps(factors.scales + at * kWide);
  const __m512 offset = _mm512_load_ps(factors.offsets + at * kWide);
  const float* row_scales = factors.row_scales + at * kTurned;
  const __m512i rounding = _mm512_castps_si512(_mm512_set1_ps(kRounding));
#pragma GCC unroll 16
  for (int m = 0; m < kTileRows; m++) {
    const __m512i exact = _mm512_load_si512(whole.products[m]);
    const __m512 moved = _mm512_castsi512_ps(_mm512_add_epi32(exact, rounding));
    const __m512 scaled =
        kShort ? _mm512_fmadd_ps(moved, scale, offset) : _mm512_mul_ps(_mm512_cvtepi32_ps(exact), scale);
    sum[m] = _mm512_fmadd_ps(scaled, _mm512_set1_ps(row_scales[m]), sum[m]);
  }
}

// 16 outputs from the one at `column` on. A block is multiplied, in the next step stored, and in the one after added:
// a tile that is stored at once keeps the next one waiting.
template <int kBlock, bool kShort>
AMX void tile_amx(const Spread& part, size_t blocks, int column, const Rows& rows, float* out, size_t stride,
                  bool begins) {
  Whole even, odd;
  __m512 sum[kTileRows];
#pragma GCC unroll 16
  for (int m = 0; m < kTileRows; m++) sum[m] = begins ? _mm512_setzero_ps() : _mm512_loadu_ps(out + m * stride);
  const int8_t *weights = part.weights + column * 4, *values = rows.values;
  // The next rows' outputs come from far while these are computed.
  for (int m = kTileRows; m < 2 * kTileRows && begins; m++) __builtin_prefetch(out + m * stride, 1, 2);
  const Factors factors = {part.scales + column, part.offsets + column, rows.turned};
  MULTIPLY_BLOCK(size_t{0}, 0, 4, 6);
  if (blocks > 1) {
    MULTIPLY_BLOCK(size_t{1}, 1, 5, 7);
  }
  STORE_BLOCK(0, even);
  size_t at = 2;
  for (; at + 1 < blocks; at += 2) {
    MULTIPLY_BLOCK(at, 0, 4, 6);
    STORE_BLOCK(1, odd);
    add_block<kShort>(even, factors, at - 2, sum);
    MULTIPLY_BLOCK(at + 1, 1, 5, 7);
    STORE_BLOCK(0, even);
    add_block<kShort>(odd, factors, at - 1, sum);
  }
  const bool is_left = at < blocks;
  if (is_left) {
    MULTIPLY_BLOCK(at, 0, 4, 6);
  }
  if (blocks > 1) STORE_BLOCK(1, odd);
  add_block<kShort>(even, factors, at - 2, sum);
  if (is_left) STORE_BLOCK(0, even);
  if (blocks > 1) add_block<kShort>(odd, factors, at - 1, sum);
  if (is_left) add_block<kShort>(even, factors, at, sum);
#pragma GCC unroll 16
  for (int m = 0; m < kTileRows; m++) _mm512_storeu_ps(out + m * stride, sum[m]);
}

template <bool kShort>
constexpr auto tile_of(int block) {
  return block == 32 ? tile_amx<32, kShort> : block == 64 ? tile_amx<64, kShort> : tile_amx<128, kShort>;
}

template <bool kNibbles>
AMX void multiply_amx(const Part& part, const Rows& rows, size_t count, float* out, size_t stride, bool begins) {
  size_t done = 0;
  if (!part.zeros && part.block > 16 && count >= kTileRows) {
    Spread spread_part;
    spread<kNibbles>(part, spread_part);
    const int depth = std::min(part.block, kTileBytes);
    TileShapes shapes;
    for (int tile = 0; tile < 8; tile++) {
      shapes.row_bytes[tile] = tile / 2 == 2 ? depth : 64;
      shapes.rows[tile] = tile / 2 == 3 ? depth / 4 : kTileRows;
    }
    asm volatile("" : : "r"(&spread_part), "r"(&shapes) : "memory");  // compilers do not see what tiles read
    _tile_loadconfig(&shapes);
    const auto tile = spread_part.is_short ? tile_of<true>(part.block) : tile_of<false>(part.block);
    const size_t bytes = static_cast<size_t>(part.blocks) * part.block * kWide / (kNibbles ? 2 : 1);
    const size_t step = bytes / (count / kTileRows);
    const uint8_t* next = part.values + bytes;  // the next part, which is called meanwhile
    for (; done + kTileRows <= count; done += kTileRows) {
      for (const uint8_t* end = next + step; next < end; next += kTileBytes)
        _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T1);
      for (int column = 0; column < kWide; column += 16)
        tile(spread_part, part.blocks, column, rows.from(done, 0, 0), out + done * stride + column, stride, begins);
    }
    _tile_release();
  }
  if (done < count)
    multiply_tiles<kVnniTiles<kNibbles>, 6>(part, rows.from(done, 0, 0), count - done, out + done * stride, stride,
                                            begins);
}

// Whether this processor has tiles for bytes, and Linux lets this process use them.
bool has_tiles() {
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & 1 << 24) && (d & 1 << 25) &&
         syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

constexpr Path kAmx = {"avx512amx", quantise_vnni, multiply_amx<true>, multiply_amx<false>, add_offsets_avx2, gate_vnni};
#endif

constexpr Path kAvx2 = {"avx2", quantise_avx2, multiply_tiles<kAvx2Tiles<true, false>, 6>,
                        multiply_tiles<kAvx2Tiles<false, false>, 6>, add_offsets_avx2, gate_avx2};
constexpr Path kAvxVnni = {"avxvnni", quantise_avx2, multiply_tiles<kAvx2Tiles<true, true>, 5>,
                           multiply_tiles<kAvx2Tiles<false, true>, 5>, add_offsets_avx2, gate_avx2};
constexpr Path kVnni = {"avx512vnni", quantise_vnni, multiply_tiles<kVnniTiles<true>, 6>,
                        multiply_tiles<kVnniTiles<false>, 6>, add_offsets_avx2, gate_vnni};

bool has(const Path& path) {
  __builtin_cpu_init();
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool vnni = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
  if (&path == &kVnni) return vnni;
#if defined(HAS_AMX)
  if (&path == &kAmx) return vnni && has_tiles();
#endif
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (&path == &kAvxVnni) return avx2 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1 << 4);
  return &path == &kPlain || avx2;
}
constexpr const Path* kPaths[] = {
#if defined(HAS_AMX)
    &kAmx,
#endif
    &kVnni, &kAvxVnni, &kAvx2, &kPlain};
#else
bool has(const Path&) { return true; }
constexpr const Path* kPaths[] = {&kPlain};
#endif

}  // namespace

const Path* path_named(const char* name) {
  for (const Path* path : kPaths)
    if (has(*path) && (*name == 0 || std::strcmp(name, path->name) == 0)) return path;
  return nullptr;
}

void pack(const uint8_t* values, const float* scales, const uint8_t* zeros, const uint16_t* offsets, Weights& made) {
  made.own_values.assign(made.bands() * made.band_bytes(), 0);
  made.own_scales.assign(made.bands() * made.blocks * kWide, 0.f);
  if (zeros) made.own_zeros.assign(made.own_scales.size(), 0);
  if (offsets) made.own_offsets.assign(made.own_scales.size(), 0);
  const size_t row_bytes = made.padded() * made.bits / 8, zero_bytes = (made.blocks * made.bits + 7) / 8;
  for (size_t n = 0; n < made.outputs; n++) {
    const size_t column = n % kWide, band = n / kWide;
    const uint8_t* from = values + n * row_bytes;
    uint8_t* to = made.own_values.data() + band * made.band_bytes() + column * 4;
    if (made.bits == 8) {
      for (size_t k = 0; k < made.padded(); k += 4, to += kWide * 4) std::memcpy(to, from + k, 4);
    } else {  // neighbours share a byte in the graph; here an input shares one with the fourth after it
      for (size_t k = 0; k < made.padded(); k += 8, from += 4, to += kWide * 4)
        for (int b = 0; b < 4; b++) {
          const int shift = b % 2 * 4;
          to[b] = static_cast<uint8_t>((from[b / 2] >> shift & 15) | (from[2 + b / 2] >> shift & 15) << 4);
        }
    }
    for (size_t at = 0; at < made.blocks; at++) {
      const size_t place = (band * made.blocks + at) * kWide + column;
      made.own_scales[place] = scales[n * made.blocks + at];
      if (offsets) made.own_offsets[place] = offsets[n * made.blocks + at];
      if (!zeros) continue;
      const uint8_t* row = zeros + n * zero_bytes;
      made.own_zeros[place] = made.bits == 8 ? row[at] : row[at / 2] >> (at % 2 * 4) & 15;
    }
  }
  made.values = made.own_values.data();
  made.scales = made.own_scales.data();
  if (zeros) made.zeros = made.own_zeros.data();
  if (offsets) made.offsets = made.own_offsets.data();
}

int32_t Product::factor() const { return weights->zeros ? -1 : -(1 << (weights->bits - 1)); }

void Product::quantise(size_t first, size_t last) const {
  for (size_t row = first; row < last; row++)
    path->quantise(input + row * weights->inputs, weights->inputs, weights->block, rows.from(row, 0, 0), factor());
}

void Product::multiply(size_t band, size_t first, size_t last) const {
  const size_t outputs = weights->outputs, left = std::min<size_t>(kWide, outputs - band * kWide);
  float* out = output + first * outputs + band * kWide;
  if (left == kWide && !gates) return multiply(*weights, band, first, last, out, outputs);
  alignas(64) float values[kPieceRows * kWide], of_gates[kPieceRows * kWide];  // beside the output
  multiply(*weights, band, first, last, values, kWide);
  if (gates) {
    multiply(*gates, band, first, last, of_gates, kWide);
    if (left == kWide) return path->gate(of_gates, values, last - first, out, outputs);
    path->gate(of_gates, values, last - first, values, kWide);
  }
  for (size_t m = 0; m < last - first; m++)
    std::copy(values + m * kWide, values + m * kWide + left, out + m * outputs);
}

void Product::multiply(const Weights& with, size_t band, size_t first, size_t last, float* out, size_t stride) const {
  const size_t count = last - first, left = std::min<size_t>(kWide, with.outputs - band * kWide);
  const uint8_t* values = with.values + band * with.band_bytes();
  const size_t place = band * with.blocks * kWide;
  const size_t most = kCached / with.block, scale_bytes = with.halves ? sizeof(uint16_t) : sizeof(float);
  const auto* scales = static_cast<const uint8_t*>(with.scales);
  for (size_t at = 0; at < with.blocks; at += most) {
    const Part part = {values + at * with.block * kWide * with.bits / 8,
                       scales + (place + at * kWide) * scale_bytes,
                       with.halves,
                       with.zeros ? with.zeros + place + at * kWide : nullptr,
                       static_cast<int>(std::min(most, with.blocks - at)),
                       with.block};
    const Multiply multiply = with.bits == 4 ? path->nibbles : path->bytes;
    multiply(part, rows.from(first, at, with.block), count, out, stride, at == 0);
  }
  if (with.offsets) path->add_offsets(with.offsets + place, rows.from(first, 0, 0), count, factor(), out, stride);
  if (!with.bias.empty())
    for (size_t m = 0; m < count; m++)
      for (size_t c = 0; c < left; c++) out[m * stride + c] += with.bias[band * kWide + c];
}

}  // namespace edgekit
