#include "unicode.h"

#include <algorithm>

namespace edgekit {

bool contains(const CodePoints& points, uint32_t point) {
  const auto after = std::upper_bound(points.begin(), points.end(), point,
                                      [](uint32_t value, const PointRange& range) { return value < range.first; });
  return after != points.begin() && point <= std::prev(after)->last;
}

}  // namespace edgekit
