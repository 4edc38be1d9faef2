// Unicode's normal form C: letters and their marks composed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>

namespace edgekit {

std::string normal_form_c(std::string_view text);

// The tables, each in rising order.
struct Decomposition {
  uint32_t point;
  uint32_t parts[4];  // all of them; 0 behind the last
};
struct Composition {
  uint32_t first, second, made;
};
struct CombiningClass {
  uint32_t first, last;
  uint32_t number;
};
extern const Decomposition kDecompositions[];
extern const Composition kCompositions[];
extern const CombiningClass kCombiningClasses[];
extern const size_t kDecompositionCount, kCompositionCount, kCombiningClassCount;

}  // namespace edgekit
