#include "ngram.h"

#include <algorithm>

namespace edgekit {
namespace {

uint64_t hash_of(const TokenId* run, size_t size) {
  uint64_t hash = size;
  for (size_t index = 0; index < size; ++index) hash = (hash ^ static_cast<uint32_t>(run[index])) * 0x9e3779b97f4a7c15;
  return hash;
}

}  // namespace

void NgramDrafter::extend(const TokenId* tokens, size_t count) {
  for (; count > 0; ++tokens, --count) {
    // A run is kept with the token after it, so the newest run does not find itself.
    const size_t end = text_.size();
    for (size_t size = kShortest; size <= std::min(kLongest, end); ++size) {
      places_[size][hash_of(text_.data() + end - size, size)] = end;
    }
    text_.push_back(*tokens);
  }
}

std::vector<TokenId> NgramDrafter::propose(size_t limit) const {
  for (size_t size = std::min(kLongest, text_.size()); size >= kShortest; --size) {
    const TokenId* tail = text_.data() + text_.size() - size;
    const auto found = places_[size].find(hash_of(tail, size));
    // Different runs may have the same hash.
    if (found == places_[size].end() || !std::equal(tail, tail + size, text_.data() + found->second - size)) continue;
    const auto first = text_.begin() + static_cast<long>(found->second);
    return {first, first + static_cast<long>(std::min(limit, text_.size() - found->second))};
  }
  return {};
}

}  // namespace edgekit
