#include "int8_cache.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace edgekit {
namespace {

constexpr float kLeast = -128.0f, kMost = 127.0f, kStepsInverse = 1.0f / 255.0f;

// As edgekit_executorch/int8_kv.py quantises: by the range of a token of a head, extended to contain zero.
void quantise(const std::vector<float>& values, int8_t* integers, float& scale, int8_t& zero) {
  const float least = std::min(*std::min_element(values.begin(), values.end()), 0.0f);
  const float most = std::max(*std::max_element(values.begin(), values.end()), 0.0f);
  scale = std::max((most - least) * kStepsInverse, std::numeric_limits<float>::min());
  const float point = std::clamp(std::nearbyint(kLeast - least / scale), kLeast, kMost);
  zero = static_cast<int8_t>(point);
  for (size_t channel = 0; channel < values.size(); ++channel) {
    const float integer = std::nearbyint(values[channel] / scale) + point;
    integers[channel] = static_cast<int8_t>(std::clamp(integer, kLeast, kMost));
  }
}

}  // namespace

void Int8Cache::drop(size_t start, size_t stop, size_t held, const Rotation* rotation) const {
  if (rotation == nullptr) {
    std::memmove(integers + start * heads * width, integers + stop * heads * width, (held - stop) * heads * width);
    std::memmove(scales + start * heads, scales + stop * heads, (held - stop) * heads * sizeof(float));
    std::memmove(zeros + start * heads, zeros + stop * heads, (held - stop) * heads);
    return;
  }
  std::vector<float> key(width);
  for (size_t from = stop * heads, to = start * heads; from < held * heads; ++from, ++to) {
    const int8_t* stored = integers + from * width;
    for (size_t channel = 0; channel < width; ++channel)
      key[channel] = (static_cast<float>(stored[channel]) - static_cast<float>(zeros[from])) * scales[from];
    rotation->back(key.data());
    quantise(key, integers + to * width, scales[to], zeros[to]);
  }
}

}  // namespace edgekit
