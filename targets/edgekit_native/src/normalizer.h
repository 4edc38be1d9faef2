// The normaliser of a tokenizer.json: replacements and a prefix.
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
    std::string pattern;  // empty: `content` is put before the text
    std::string content;
  };
  void add(const Json& described, int depth);

  std::vector<Step> steps_;
};

// `text` with every `pattern` as `content`.
std::string replaced(std::string_view text, const std::string& pattern, const std::string& content);

// The `pattern` of a Replace step; a regular expression is refused.
const std::string& literal_pattern(const Json& described);

}  // namespace edgekit
