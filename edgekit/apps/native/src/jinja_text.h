// Texts as Python has them: white space, cases, numbers and containers written out.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "jinja_value.h"

namespace edgekit::jinja {

bool is_space(uint32_t point);  // of str.isspace, and of \s

size_t count_points(std::string_view text);
std::string_view stripped(std::string_view text, bool left, bool right);  // of white space
std::string_view stripped(std::string_view text, std::string_view letters, bool left, bool right);
std::vector<std::string> lines_of(std::string_view text, Budget& budget);  // str.splitlines
// `most` cuts at most; below 0: all. Without a separator, runs of white space separate.
std::vector<std::string> parts_of(std::string_view text, std::optional<std::string_view> separator, int64_t most,
                                  Budget& budget);
std::vector<std::string> parts_from_the_right(std::string_view text, std::string_view separator, int64_t most,
                                  Budget& budget);

// Refuse letters beyond ASCII, for which there is no table here.
std::string upper(std::string text);
std::string lower(std::string text);
std::string capitalized(const std::string& text);
std::string title(const std::string& text);  // of the filter, which knows other words than str.title

std::string replaced(const std::string& text, const std::string& old, const std::string& with, int64_t most,
                     Budget& budget);

std::string str(const Value& value, Budget& budget);   // of Python
std::string repr(const Value& value, Budget& budget);  // of Python

struct JsonStyle {
  bool is_ascii = false, sorts_keys = false;
  std::optional<std::string> indent;
  std::string comma = ", ", colon = ": ";
};
std::string to_json(const Value& value, const JsonStyle& style, Budget& budget);

}  // namespace edgekit::jinja
