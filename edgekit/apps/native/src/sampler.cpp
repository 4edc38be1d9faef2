#include "sampler.h"

#include <algorithm>
#include <cmath>

#include "errors.h"
#include "filters.h"
#include "noise.h"

namespace edgekit {
namespace {

void check_bounds(const char* name, double value, double least, double most) {
  if (value >= least && value <= most) return;
  refuse(std::string(name) + ": " + std::to_string(value) + " is not between " + std::to_string(least) + " and " +
         std::to_string(most));
}

// The first of the largest scores; refuses one that is not a number, and an infinite largest one.
// Compilers turn the inner loop into vectors, which they do not with std::max_element.
TokenId likeliest(const float* scores, size_t count) {
  constexpr size_t kLanes = 16, kBlock = 64 * kLanes;
  float best = -HUGE_VALF;
  size_t place = 0;
  bool has_nan = false;
  for (size_t start = 0; start < count; start += kBlock) {
    const size_t end = std::min(start + kBlock, count);
    float largest[kLanes];
    std::fill(largest, largest + kLanes, -HUGE_VALF);
    int unordered[kLanes] = {};
    size_t at = start;
    for (; at + kLanes <= end; at += kLanes) {
      for (size_t lane = 0; lane < kLanes; ++lane) {
        const float score = scores[at + lane];
        largest[lane] = score > largest[lane] ? score : largest[lane];
        unordered[lane] |= score != score;
      }
    }
    for (; at < end; ++at) {
      largest[0] = std::max(largest[0], scores[at]);
      unordered[0] |= std::isnan(scores[at]);
    }
    has_nan = has_nan || std::any_of(unordered, unordered + kLanes, [](int each) { return each != 0; });
    const float most = *std::max_element(largest, largest + kLanes);
    if (most > best) best = most, place = start;
  }
  if (has_nan || !std::isfinite(best)) refuse("the engine returned a logit that is not finite");
  return static_cast<TokenId>(std::find(scores + place, scores + count, best) - scores);
}

}  // namespace

void Sampling::check() const {
  constexpr double kAboveZero = 1e-300;
  check_bounds("temperature", temperature, 0.0, 100.0);
  check_bounds("top_k", static_cast<double>(top_k), 0.0, 1 << 20);
  check_bounds("top_p", top_p, kAboveZero, 1.0);
  check_bounds("min_p", min_p, 0.0, 1.0);
  check_bounds("typical_p", typical_p, kAboveZero, 1.0);
  check_bounds("repetition_penalty", repetition_penalty, 0.01, 10.0);
  check_bounds("presence_penalty", presence_penalty, -2.0, 2.0);
  check_bounds("frequency_penalty", frequency_penalty, -2.0, 2.0);
  if (seed > INT64_MAX) refuse("seed: " + std::to_string(seed) + " is more than 2^63 - 1");
}

Sampler::Sampler(const Sampling& sampling, const std::vector<TokenId>& prompt)
    : sampling_(sampling),
      adjusts_(sampling.repetition_penalty != 1.0 || sampling.presence_penalty != 0.0 ||
               sampling.frequency_penalty != 0.0) {
  sampling_.check();
  if (sampling_.repetition_penalty == 1.0) return;
  for (const TokenId token : prompt) seen_[token] = true;
}

TokenId Sampler::choose(const float* logits, size_t vocabulary, size_t position) const {
  if (sampling_.temperature == 0.0 && !adjusts_) return likeliest(logits, vocabulary);
  std::vector<float> scores(logits, logits + vocabulary);
  if (adjusts_) adjust(scores);
  const TokenId best = likeliest(scores.data(), scores.size());
  if (sampling_.temperature == 0.0) return best;
  std::vector<Candidate> candidates;
  candidates.reserve(scores.size());
  for (size_t token = 0; token < scores.size(); ++token)
    candidates.push_back({static_cast<TokenId>(token), scores[token]});
  const Sampling& options = sampling_;
  const float high = scores[static_cast<size_t>(best)];
  if (options.top_k > 0) keep_best(candidates, options.top_k);
  if (options.top_p != 1.0) keep_top_p(candidates, options.top_p, options.temperature, high);
  if (options.min_p != 0.0) keep_min_p(candidates, options.min_p, options.temperature, high);
  if (options.typical_p != 1.0) keep_typical(candidates, options.typical_p, options.temperature, high);
  return choose_by_noise(candidates, options.seed, position, options.temperature);
}

void Sampler::observe(TokenId token) {
  if (sampling_.repetition_penalty != 1.0) seen_[token] = true;
  if (sampling_.presence_penalty == 0.0 && sampling_.frequency_penalty == 0.0) return;
  const auto [place, is_new] = added_.emplace(token, 0.0f);
  place->second -= static_cast<float>(sampling_.frequency_penalty + (is_new ? sampling_.presence_penalty : 0.0));
}

void Sampler::adjust(std::vector<float>& scores) const {
  const auto penalty = static_cast<float>(sampling_.repetition_penalty);
  for (const auto& each : seen_) {
    float& score = scores[static_cast<size_t>(each.first)];
    score = score > 0 ? score / penalty : score * penalty;
  }
  for (const auto& [token, value] : added_) scores[static_cast<size_t>(token)] += value;
}

}  // namespace edgekit
