// The pre-tokenizer of a tokenizer.json: cuts a text into pieces that no token crosses.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "json.h"

namespace edgekit {

class Splitter {
 public:
  virtual ~Splitter() = default;
  // Append the parts of a piece. `is_first`: the text begins with it.
  virtual void split(std::string_view piece, bool is_first, std::vector<std::string>& out) const = 0;
};

class PreTokenizer {
 public:
  explicit PreTokenizer(const Json* described);  // null: none; throws std::runtime_error
  std::vector<std::string> operator()(std::string piece, bool is_first) const;

 private:
  void add(const Json& described, int depth);

  std::vector<std::unique_ptr<Splitter>> steps_;
};

}  // namespace edgekit
