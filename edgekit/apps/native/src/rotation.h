// Rotary positions of keys: after an eviction, kept keys are rotated back by as many positions as were dropped.
#pragma once

#include <cstddef>
#include <vector>

#include "json.h"

namespace edgekit {

class Rotation {
 public:
  // `rope` is one of the plan's. Throws std::runtime_error for kinds that are not supported.
  Rotation(const Json& rope, int64_t head_width);

  void prepare(size_t positions);
  void back(float* key) const;  // of one token and head, by as many positions as were prepared

 private:
  std::vector<double> frequencies_;
  std::vector<float> cosines_, sines_;
  bool is_interleaved_;
};

}  // namespace edgekit
