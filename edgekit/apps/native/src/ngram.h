// Drafts by prompt lookup: find the last few tokens earlier in the text, and propose what followed them there.
#pragma once

#include <array>
#include <unordered_map>
#include <vector>

#include "bpe.h"

namespace edgekit {

class NgramDrafter {
 public:
  void extend(const TokenId* tokens, size_t count);  // the text goes on
  std::vector<TokenId> propose(size_t limit) const;  // at most `limit` tokens, often none

 private:
  static constexpr size_t kLongest = 4, kShortest = 2;  // tokens of a run; the longest is tried first

  std::vector<TokenId> text_;
  std::array<std::unordered_map<uint64_t, size_t>, kLongest + 1> places_;  // by length: hash of a run → its newest end
};

}  // namespace edgekit
