// The decoder of a tokenizer.json: the text that the texts of tokens stand for.
#pragma once

#include <string>
#include <vector>

#include "json.h"

namespace edgekit {

class Decoder {
 public:
  explicit Decoder(const Json* described);  // throws std::runtime_error
  std::string operator()(std::vector<std::string> tokens) const;

  bool has_byte_fallback() const { return has_byte_fallback_; }

 private:
  enum class Kind { kByteLevel, kReplace, kByteFallback, kFuse, kStrip, kMetaspace };
  struct Step {
    Kind kind;
    std::string pattern, content;
    size_t start = 0, stop = 0;
  };
  void add(const Json& described, int depth);

  std::vector<Step> steps_;
  bool has_byte_fallback_ = false;
};

// The byte that a token such as <0x0A> stands for; -1: it is none.
int byte_of_token(std::string_view token);

}  // namespace edgekit
