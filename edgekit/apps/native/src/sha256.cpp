#include "sha256.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__) && (defined(__ARM_FEATURE_SHA2) || !defined(__clang__) || __clang_major__ >= 16)
#define NATIVE_ARM_SHA
#include <arm_neon.h>
#ifdef __linux__
#include <sys/auxv.h>
#endif
#endif

namespace edgekit {
namespace {

// The first 32 bits of the fractions of the cube roots of the first 64 primes.
constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98,
    0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786,
    0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8,
    0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13,
    0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819,
    0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a,
    0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7,
    0xc67178f2};

uint32_t turned(uint32_t value, int by) { return (value >> by) | (value << (32 - by)); }

// Adds one block of 64 bytes to the state.
void add_plain(uint32_t* state, const uint8_t* data) {
  uint32_t w[64];
  for (int i = 0; i < 16; ++i) {
    w[i] = uint32_t(data[4 * i]) << 24 | uint32_t(data[4 * i + 1]) << 16 | uint32_t(data[4 * i + 2]) << 8 |
           uint32_t(data[4 * i + 3]);
  }
  for (int i = 16; i < 64; ++i) {
    const uint32_t low = turned(w[i - 15], 7) ^ turned(w[i - 15], 18) ^ (w[i - 15] >> 3);
    const uint32_t high = turned(w[i - 2], 17) ^ turned(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + low + w[i - 7] + high;
  }
  uint32_t a = state[0], b = state[1], c = state[2], d = state[3], e = state[4], f = state[5], g = state[6], h = state[7];
  for (int i = 0; i < 64; ++i) {
    const uint32_t choice = (e & f) ^ (~e & g), majority = (a & b) ^ (a & c) ^ (b & c);
    const uint32_t one = h + (turned(e, 6) ^ turned(e, 11) ^ turned(e, 25)) + choice + kRound[i] + w[i];
    const uint32_t two = (turned(a, 2) ^ turned(a, 13) ^ turned(a, 22)) + majority;
    h = g, g = f, f = e, e = d + one, d = c, c = b, b = a, a = one + two;
  }
  const uint32_t added[8] = {a, b, c, d, e, f, g, h};
  for (int i = 0; i < 8; ++i) state[i] += added[i];
}

#if defined(__x86_64__)
// By the processor's own rounds: four words a step, and the words of the step four later.
__attribute__((target("sha,sse4.1,ssse3"))) void add_fast(uint32_t* state, const uint8_t* data) {
  const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  auto* stored = reinterpret_cast<__m128i*>(state);
  const __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128(stored), 0xb1);
  const __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128(stored + 1), 0x1b);
  const __m128i first_abef = _mm_alignr_epi8(cdab, efgh, 8), first_cdgh = _mm_blend_epi16(efgh, cdab, 0xf0);
  __m128i abef = first_abef, cdgh = first_cdgh, w[4];
  for (int i = 0; i < 4; ++i) {
    w[i] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data) + i), swap);
  }
  for (int i = 0; i < 16; ++i) {
    const __m128i& newest = w[(i + 3) % 4];
    const __m128i sum = _mm_add_epi32(w[i % 4], _mm_loadu_si128(reinterpret_cast<const __m128i*>(kRound) + i));
    cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
    abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
    const __m128i older = _mm_sha256msg1_epu32(w[i % 4], w[(i + 1) % 4]);
    w[i % 4] = _mm_sha256msg2_epu32(_mm_add_epi32(older, _mm_alignr_epi8(newest, w[(i + 2) % 4], 4)), newest);
  }
  const __m128i feba = _mm_shuffle_epi32(_mm_add_epi32(abef, first_abef), 0x1b);
  const __m128i dchg = _mm_shuffle_epi32(_mm_add_epi32(cdgh, first_cdgh), 0xb1);
  _mm_storeu_si128(stored, _mm_blend_epi16(feba, dchg, 0xf0));
  _mm_storeu_si128(stored + 1, _mm_alignr_epi8(dchg, feba, 8));
}

bool is_fast() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kSsse3 = 1u << 9, kSse41 = 1u << 19, kSha = 1u << 29;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & kSsse3) == 0 || (c & kSse41) == 0) return false;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b & kSha) != 0;
}
#elif defined(NATIVE_ARM_SHA)
#ifdef __clang__
#define NATIVE_SHA_TARGET "sha2"
#else
#define NATIVE_SHA_TARGET "+crypto"
#endif
// By the processor's own rounds: four words a step, and the words of the step four later.
__attribute__((target(NATIVE_SHA_TARGET))) void add_fast(uint32_t* state, const uint8_t* data) {
  const uint32x4_t first_abcd = vld1q_u32(state), first_efgh = vld1q_u32(state + 4);
  uint32x4_t abcd = first_abcd, efgh = first_efgh, w[4];
  for (int i = 0; i < 4; ++i) w[i] = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(data + 16 * i)));
  for (int i = 0; i < 16; ++i) {
    const uint32x4_t sum = vaddq_u32(w[i % 4], vld1q_u32(kRound + 4 * i)), before = abcd;
    abcd = vsha256hq_u32(abcd, efgh, sum);
    efgh = vsha256h2q_u32(efgh, before, sum);
    w[i % 4] = vsha256su1q_u32(vsha256su0q_u32(w[i % 4], w[(i + 1) % 4]), w[(i + 2) % 4], w[(i + 3) % 4]);
  }
  vst1q_u32(state, vaddq_u32(abcd, first_abcd));
  vst1q_u32(state + 4, vaddq_u32(efgh, first_efgh));
}

bool is_fast() {
#ifdef __linux__
  constexpr unsigned long kSha2 = 1ul << 6;
  return (getauxval(AT_HWCAP) & kSha2) != 0;
#else
  return true;
#endif
}
#else
constexpr auto add_fast = add_plain;
bool is_fast() { return false; }
#endif

}  // namespace

Sha256::Sha256(bool may_be_fast) {
  static const bool has_fast = is_fast();
  add_ = may_be_fast && has_fast ? add_fast : add_plain;
}

void Sha256::update(const void* data, size_t size) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  size_ += size;
  while (size > 0) {
    if (held_ == 0 && size >= 64) {
      add_(state_.data(), bytes);
      bytes += 64;
      size -= 64;
      continue;
    }
    const size_t taken = std::min(size, 64 - held_);
    std::memcpy(waiting_.data() + held_, bytes, taken);
    held_ += taken;
    bytes += taken;
    size -= taken;
    if (held_ == 64) {
      add_(state_.data(), waiting_.data());
      held_ = 0;
    }
  }
}

std::string Sha256::hex() {
  const uint64_t bits = size_ * 8;
  const uint8_t one = 0x80, zero = 0;
  update(&one, 1);
  while (held_ != 56) update(&zero, 1);
  uint8_t length[8];
  for (int place = 0; place < 8; ++place) length[place] = static_cast<uint8_t>(bits >> (56 - 8 * place));
  update(length, 8);
  std::string found;
  char word[9];
  for (uint32_t part : state_) {
    std::snprintf(word, sizeof word, "%08x", part);
    found += word;
  }
  return found;
}

std::string sha256_of(const std::string& bytes) {
  Sha256 hash;
  hash.update(bytes.data(), bytes.size());
  return hash.hex();
}

std::string sha256_of_file(const std::string& path) {
  std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path.c_str(), "rb"), &std::fclose);
  if (!file) throw std::runtime_error(path + ": cannot be read; copy it again");
  Sha256 hash;
  std::vector<uint8_t> buffer(1 << 20);
  while (size_t count = std::fread(buffer.data(), 1, buffer.size(), file.get())) hash.update(buffer.data(), count);
  if (std::ferror(file.get())) throw std::runtime_error(path + ": cannot be read to its end; copy it again");
  return hash.hex();
}

}  // namespace edgekit
