#include "noise.h"

#include <algorithm>
#include <cmath>

#include "blake2b.h"
#include "portable_math.h"

namespace edgekit {
namespace {

constexpr double kSmallestTemperature = 1e-200;
constexpr size_t kFew = 4096;
constexpr double kLikely = 0.998;  // quantile of the noise; tokens with less are ruled out without a logarithm

// 32 random bits for each token, by a keyed hash.
class Bits {
 public:
  Bits(uint64_t seed, uint64_t position) {
    uint8_t key[16];
    for (int place = 0; place < 8; ++place) {
      key[place] = static_cast<uint8_t>(seed >> (8 * place));
      key[8 + place] = static_cast<uint8_t>(position >> (8 * place));
    }
    const auto words = blake2b(key, sizeof key, 12);
    stride_ = static_cast<uint32_t>(words[0]) | 1;
    start_ = static_cast<uint32_t>(words[0] >> 32);
    flip_ = static_cast<uint32_t>(words[1]);
  }

  uint32_t operator()(TokenId token) const {
    uint32_t bits = static_cast<uint32_t>(token) * stride_ + start_;
    bits ^= bits >> 16;
    bits *= 0x7feb352d;
    bits ^= bits >> 15;
    bits *= 0x846ca68b;
    bits ^= bits >> 16;
    return bits ^ flip_;
  }

 private:
  uint32_t stride_, start_, flip_;
};

double gumbel(uint32_t bits) { return -portable_log(-portable_log((bits + 0.5) * 0x1p-32)); }

}  // namespace

TokenId choose_by_noise(const std::vector<Candidate>& candidates, uint64_t seed, uint64_t position,
                        double temperature) {
  const Bits bits(seed, position);
  const auto is_less = [](const Candidate& one, const Candidate& other) { return one.score < other.score; };
  const Candidate& first = *std::max_element(candidates.begin(), candidates.end(), is_less);
  const double high = first.score, scale = std::max(temperature, kSmallestTemperature);
  const auto sum_of = [&](const Candidate& each, uint32_t noise) {
    return (each.score - high) / scale + gumbel(noise);
  };
  // The winner is at least as large as this known sum, so it has rare noise or a high score.
  double bound = -HUGE_VAL;
  uint32_t rare = 0;
  if (candidates.size() >= kFew) {
    const double least = gumbel(bits(first.token)) + portable_log(-portable_log(kLikely)) - 1e-6;
    bound = std::nextafter(high + least * temperature, -HUGE_VAL);  // below `high`, however large that is
    rare = static_cast<uint32_t>(kLikely * 0x1p32);
  }
  TokenId best = first.token;
  double largest = -HUGE_VAL;
  for (const Candidate& each : candidates) {
    const uint32_t noise = bits(each.token);
    if (noise < rare && each.score <= bound) continue;
    const double sum = sum_of(each, noise);
    if (sum > largest) largest = sum, best = each.token;
  }
  return best;
}

}  // namespace edgekit
