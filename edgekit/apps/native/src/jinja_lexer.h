// Cuts a template into tokens, with the white space around its tags removed as chat templates expect it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace edgekit::jinja {

struct Token {
  enum Kind { kData, kVariableBegin, kVariableEnd, kBlockBegin, kBlockEnd, kName, kText, kWhole, kFloat, kOperator, kEnd };
  Kind kind;
  std::string text;  // of a text: without quotes and escapes
  size_t line;

  bool is_name(std::string_view wanted) const { return kind == kName && text == wanted; }
  bool is_operator(std::string_view wanted) const { return kind == kOperator && text == wanted; }
};

// The last token is kEnd. Throws std::runtime_error.
std::vector<Token> tokens_of(const std::string& source);

}  // namespace edgekit::jinja
