// A cache of 8 bits in a program: each token of a head has its own scale and zero point.
#pragma once

#include <cstddef>
#include <cstdint>

#include "rotation.h"

namespace edgekit {

struct Int8Cache {  // keys or values of a layer
  int8_t* integers;  // [slot, head, width]
  float* scales;     // [slot, head]
  int8_t* zeros;     // [slot, head]
  size_t heads, width;

  // Of `held` tokens, drop those from `start` to `stop`. With a rotation, later keys are rotated back and quantised
  // again, since that changes the range of their channels; without one, tokens are moved as they are.
  void drop(size_t start, size_t stop, size_t held, const Rotation* rotation) const;
};

}  // namespace edgekit
