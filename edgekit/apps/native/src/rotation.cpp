#include "rotation.h"

#include <algorithm>
#include <cmath>

#include "errors.h"

namespace edgekit {
namespace {

double number_of(const Json& rope, const char* name) {
  const double found = rope.at(name).number(name);
  if (!(found > 0.0) || !(found < 1e16)) refuse("plan: " + std::string(name) + " of a rope is " + std::to_string(found));
  return found;
}

// Keeps a high frequency, divides a low one by the factor, blends one in between.
double of_llama3(const Json& rope, double frequency) {
  const double low = number_of(rope, "low_freq_factor"), high = number_of(rope, "high_freq_factor");
  const double turns = number_of(rope, "original_positions") * frequency / (2 * 3.141592653589793);
  const double blend = std::clamp((turns - low) / (high - low), 0.0, 1.0);
  return (1 - blend) * frequency / number_of(rope, "factor") + blend * frequency;
}

std::vector<double> frequencies_of(const Json& rope, int64_t width) {
  const std::string& kind = rope.at("kind").text("kind");
  const double theta = number_of(rope, "theta"), factor = number_of(rope, "factor");
  const auto turning = static_cast<int64_t>(number_of(rope, "proportion") * static_cast<double>(width) / 2);
  std::vector<double> found;
  for (int64_t index = 0; index < width / 2; ++index) {
    const double plain = std::pow(theta, static_cast<double>(-2 * index) / static_cast<double>(width));
    if (kind == "default") found.push_back(plain);
    else if (kind == "linear") found.push_back(plain / factor);
    else if (kind == "proportional") found.push_back(index < turning ? plain / factor : 0.0);
    else if (kind == "llama3") found.push_back(of_llama3(rope, plain));
    else refuse("a window over the rope " + quote_short(kind) + " is not supported; export it without --window");
  }
  return found;
}

}  // namespace

Rotation::Rotation(const Json& rope, int64_t head_width) {
  const int64_t width = rope.at("dim").whole("dim");
  if (width < 2 || width % 2 != 0 || width > head_width) refuse("plan: dim of a rope is " + std::to_string(width));
  const Json* interleaved = rope.find("interleaved");
  is_interleaved_ = interleaved != nullptr && interleaved->truth("interleaved");
  frequencies_ = frequencies_of(rope, width);
}

void Rotation::prepare(size_t positions) {
  cosines_.clear(), sines_.clear();
  for (const double each : frequencies_) {
    cosines_.push_back(static_cast<float>(std::cos(static_cast<double>(positions) * each)));
    sines_.push_back(static_cast<float>(std::sin(static_cast<double>(positions) * each)));
  }
}

void Rotation::back(float* key) const {
  const size_t pairs = cosines_.size();
  for (size_t pair = 0; pair < pairs; ++pair) {
    float& first = key[is_interleaved_ ? 2 * pair : pair];
    float& second = key[is_interleaved_ ? 2 * pair + 1 : pair + pairs];
    const float turned_first = first * cosines_[pair] + second * sines_[pair];
    second = second * cosines_[pair] + first * -sines_[pair];
    first = turned_first;
  }
}

}  // namespace edgekit
