// Classes of code points that pre-tokenizers split by.
#pragma once

#include <cstdint>
#include <vector>

namespace edgekit {

struct PointRange {
  uint32_t first, last;
};
using CodePoints = std::vector<PointRange>;  // in rising order

extern const CodePoints kLetters, kNumbers, kSpaces;  // \p{L}, \p{N} and \s
extern const CodePoints kDigits;                      // of the pre-tokenizer `Digits`, which knows a newer Unicode

bool contains(const CodePoints& points, uint32_t point);

}  // namespace edgekit
