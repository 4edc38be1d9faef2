// Numbers of 16 bits, rounded to nearest even.
#pragma once

#include <cstdint>

namespace edgekit {

float from_half(uint16_t half);
uint16_t to_half(float number);

}  // namespace edgekit
