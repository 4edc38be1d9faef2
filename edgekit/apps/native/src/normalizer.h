// The normaliser of a tokenizer.json: replacements, a prefix, and Unicode's normal form C.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "json.h"

namespace edgekit {

class Normalizer {
 public:
  explicit Normalizer(const Json* described);  // null: none; throws std::runtime_error
  std::string operator()(std::string_view text) const;

 private:
  struct Step {
    enum Kind { kReplace, kPrepend, kCompose } kind;
    std::string pattern;
    std::string content;  // in the place of the pattern, or before the text
  };
  void add(const Json& described, int depth);

  std::vector<Step> steps_;
};

// `text` with every `pattern` as `content`.
std::string replaced(std::string_view text, const std::string& pattern, const std::string& content);

// The `pattern` of a Replace step; a regular expression is refused.
const std::string& literal_pattern(const Json& described);

}  // namespace edgekit
