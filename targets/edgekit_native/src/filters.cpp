#include "filters.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace edgekit {
namespace {

// A score's distance from the largest in units of the temperature: 0 or less.
double level(float score, double temperature, float high) {
  return (score - static_cast<double>(high)) / std::max(temperature, 1e-200);
}

// Keep the `count` best; of equal scores, the first.
void keep_down_to(std::vector<Candidate>& candidates, float bound, size_t count) {
  size_t above = 0;
  for (const Candidate& each : candidates) above += each.score > bound;
  size_t equal = count - above;
  const auto is_dropped = [&](const Candidate& each) {
    if (each.score != bound) return each.score < bound;
    if (equal == 0) return true;
    --equal;
    return false;
  };
  std::vector<Candidate> kept;
  std::remove_copy_if(candidates.begin(), candidates.end(), std::back_inserter(kept), is_dropped);
  candidates = std::move(kept);
}

}  // namespace

void keep_best(std::vector<Candidate>& candidates, size_t count) {
  if (count >= candidates.size()) return;
  std::vector<float> scores;
  for (const Candidate& each : candidates) scores.push_back(each.score);
  std::nth_element(scores.begin(), scores.begin() + static_cast<long>(count - 1), scores.end(), std::greater<>());
  keep_down_to(candidates, scores[count - 1], count);
}

void keep_top_p(std::vector<Candidate>& candidates, double mass, double temperature, float high) {
  std::vector<double> weights;
  for (const Candidate& each : candidates) weights.push_back(std::exp(level(each.score, temperature, high)));
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  // Tokens below this weight have less than 1 - mass together, so only those above it are sorted.
  const double bound = total * 0.99 * (1.0 - mass) / static_cast<double>(candidates.size());
  std::vector<float> falling;
  for (size_t index = 0; index < candidates.size(); ++index) {
    if (weights[index] >= bound) falling.push_back(candidates[index].score);
  }
  std::sort(falling.begin(), falling.end(), std::greater<>());
  double cumulative = 0.0;
  size_t last = 0;
  for (; last + 1 < falling.size(); ++last) {
    cumulative += std::exp(level(falling[last], temperature, high));
    if (cumulative >= mass * total) break;
  }
  keep_down_to(candidates, falling[last], last + 1);
}

void keep_min_p(std::vector<Candidate>& candidates, double share, double temperature, float high) {
  const double reach = -std::log(share) * temperature;
  const auto is_far = [&](const Candidate& each) { return static_cast<double>(high) - each.score > reach; };
  candidates.erase(std::remove_if(candidates.begin(), candidates.end(), is_far), candidates.end());
}

void keep_typical(std::vector<Candidate>& candidates, double mass, double temperature, float high) {
  struct Typical {
    Candidate candidate;
    double weight, far;
  };
  std::vector<Typical> near;
  double total = 0.0, expected = 0.0;
  for (const Candidate& each : candidates) {
    const double distance = level(each.score, temperature, high);
    if (distance < -60.0) continue;  // without weight in float64
    near.push_back({each, std::exp(distance), distance});
    total += near.back().weight;
    expected += near.back().weight * distance;
  }
  // A level is the negative surprise, up to a common constant.
  for (Typical& each : near) each.far = std::fabs(each.far - expected / total);
  std::vector<size_t> ranked(near.size());
  std::iota(ranked.begin(), ranked.end(), size_t{0});
  std::stable_sort(ranked.begin(), ranked.end(),
                   [&](size_t one, size_t other) { return near[one].far < near[other].far; });
  double cumulative = 0.0;
  size_t count = 0;
  while (count < ranked.size()) {
    cumulative += near[ranked[count++]].weight;
    if (cumulative >= mass * total) break;
  }
  ranked.resize(count);
  std::sort(ranked.begin(), ranked.end());
  candidates.clear();
  for (const size_t each : ranked) candidates.push_back(near[each].candidate);
}

}  // namespace edgekit
