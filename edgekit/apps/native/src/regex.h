// The regular expressions that pre-tokenizers split texts by.
//
// Alternatives of single characters, classes ([...], \s \S \p{L} \p{N} and their negations) and groups, with greedy
// counts (? * + {n,m}) and lookaheads of one character. Everything else is refused by name. Alternatives are tried in
// order and counts give characters back, as the usual engines do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "unicode.h"

namespace edgekit {

class Regex {
 public:
  explicit Regex(const std::string& pattern);  // throws std::runtime_error

  // The end of the match that begins at `place`, or npos. `steps` is lowered; it throws when none are left.
  size_t match(std::string_view text, size_t place, int64_t& steps) const;

 private:
  friend class RegexParser;

  struct Class {
    const CodePoints* points;
    bool is_negated;
  };
  struct Item {  // one character, `least` to `most` times; or, where `looks` is not 0, a look at the next one
    CodePoints ranges;
    std::vector<Class> classes;
    bool is_negated = false;
    size_t least = 1, most = 1;
    int looks = 0;  // 1: the next character must be in the class; -1: there is none, or it is not in it

    bool takes(uint32_t point) const;
  };
  using Sequence = std::vector<Item>;

  size_t match_from(const Sequence& items, size_t index, std::string_view text, size_t place, int64_t& steps) const;

  std::vector<Sequence> alternatives_;  // groups are multiplied out, which keeps the order of what is tried
};

}  // namespace edgekit
