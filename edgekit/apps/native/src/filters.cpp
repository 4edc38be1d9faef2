#include "filters.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "portable_math.h"

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

// Values in the order of `comes_before`; sorts only as many as are read.
template <class Value, class Order>
class Sorted {
 public:
  Sorted(std::vector<Value> values, Order comes_before) : values_(std::move(values)), comes_before_(comes_before) {}

  const Value& operator[](size_t place) {
    while (place >= sorted_) sort_more();
    return values_[place];
  }

 private:
  void sort_more() {
    const size_t end = std::min(values_.size(), std::max<size_t>(256, 8 * sorted_));
    const auto at = [&](size_t place) { return values_.begin() + static_cast<long>(place); };
    if (end < values_.size()) std::nth_element(at(sorted_), at(end), values_.end(), comes_before_);
    std::sort(at(sorted_), at(end), comes_before_);
    sorted_ = end;
  }

  std::vector<Value> values_;
  Order comes_before_;
  size_t sorted_ = 0;
};

}  // namespace

void keep_best(std::vector<Candidate>& candidates, size_t count) {
  if (count >= candidates.size()) return;
  std::vector<float> scores;
  for (const Candidate& each : candidates) scores.push_back(each.score);
  std::nth_element(scores.begin(), scores.begin() + static_cast<long>(count - 1), scores.end(), std::greater<>());
  keep_down_to(candidates, scores[count - 1], count);
}

void keep_top_p(std::vector<Candidate>& candidates, double mass, double temperature, float high) {
  const auto weight = [&](float score) { return portable_exp(level(score, temperature, high)); };
  double total = 0.0;
  std::vector<float> scores;
  for (const Candidate& each : candidates) {
    total += weight(each.score);
    scores.push_back(each.score);
  }
  Sorted falling(std::move(scores), std::greater<float>());
  double cumulative = weight(falling[0]);
  size_t last = 0;
  while (cumulative < mass * total && last + 1 < candidates.size()) cumulative += weight(falling[++last]);
  keep_down_to(candidates, falling[last], last + 1);
}

void keep_min_p(std::vector<Candidate>& candidates, double share, double temperature, float high) {
  const double reach = -portable_log(std::max(share, std::numeric_limits<double>::min())) * temperature;
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
    near.push_back({each, portable_exp(distance), distance});
    total += near.back().weight;
    expected += near.back().weight * distance;
  }
  // A level is the negative surprise, up to a common constant.
  for (Typical& each : near) each.far = std::fabs(each.far - expected / total);
  const auto by_token = [](const Typical& one, const Typical& other) {
    return one.candidate.token < other.candidate.token;
  };
  const size_t count = near.size();
  Sorted ranked(std::move(near), [&](const Typical& one, const Typical& other) {
    return one.far != other.far ? one.far < other.far : by_token(one, other);
  });
  std::vector<Typical> kept{ranked[0]};
  for (double cumulative = kept[0].weight; cumulative < mass * total && kept.size() < count;) {
    kept.push_back(ranked[kept.size()]);
    cumulative += kept.back().weight;
  }
  std::sort(kept.begin(), kept.end(), by_token);
  candidates.clear();
  for (const Typical& each : kept) candidates.push_back(each.candidate);
}

}  // namespace edgekit
