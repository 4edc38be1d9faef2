#include "json.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string_view>

#include "errors.h"
#include "utf8.h"

namespace edgekit {
namespace {

constexpr int kDeepest = 32;
constexpr int kMostValues = 8 << 20;  // a value takes 40 bytes, and may take only 2 of the text

class Reader {
 public:
  Reader(const std::string& text, bool rounds) : text_(text), rounds_(rounds) {}

  Json whole() {
    if (const size_t wrong = first_invalid(text_); wrong < text_.size()) {
      place_ = wrong;
      fail("it is not UTF-8");
    }
    Json found = value(0);
    blanks();
    if (place_ != text_.size()) fail("more than one value");
    return found;
  }

 private:
  [[noreturn]] void fail(const char* why) const {
    throw std::runtime_error("not the JSON that was expected: " + std::string(why) + " at byte " +
                             std::to_string(place_));
  }

  void blanks() {
    while (place_ < text_.size() && std::string_view(" \t\r\n").find(text_[place_]) != std::string_view::npos) ++place_;
  }

  char next() {
    if (place_ >= text_.size()) fail("it ends too soon");
    return text_[place_];
  }

  void expect(char wanted) {
    if (next() != wanted) fail("another character");
    ++place_;
  }

  bool word(const char* wanted) {
    const std::string_view asked(wanted);
    if (text_.compare(place_, asked.size(), asked) != 0) return false;
    place_ += asked.size();
    return true;
  }

  Json value(int depth) {
    if (depth > kDeepest) fail("too deep");
    if (++values_ > kMostValues) fail("too many values");
    blanks();
    const char first = next();
    if (first == '{') return members(depth);
    if (first == '[') return list(depth);
    if (first == '"') return Json(quoted());
    if (word("null")) return Json();
    if (word("true")) return Json(true);
    if (word("false")) return Json(false);
    return numeral();
  }

  Json members(int depth) {
    Json::Members found;
    expect('{');
    blanks();
    if (next() == '}') return ++place_, Json(found);
    for (;;) {
      blanks();
      std::string name = quoted();
      blanks();
      expect(':');
      found.emplace_back(std::move(name), value(depth + 1));
      blanks();
      if (next() == '}') {
        refuse_doubles(found);
        return ++place_, Json(std::move(found));
      }
      expect(',');
    }
  }

  void refuse_doubles(const Json::Members& members) const {
    std::vector<std::string_view> names;
    for (const auto& each : members) names.push_back(each.first);
    std::sort(names.begin(), names.end());
    if (std::adjacent_find(names.begin(), names.end()) != names.end()) fail("a key that occurs twice");
  }

  Json list(int depth) {
    Json::List found;
    expect('[');
    blanks();
    if (next() == ']') return ++place_, Json(found);
    for (;;) {
      found.push_back(value(depth + 1));
      blanks();
      if (next() == ']') return ++place_, Json(std::move(found));
      expect(',');
    }
  }

  std::string quoted() {
    std::string found;
    expect('"');
    for (;;) {
      const char here = next();
      ++place_;
      if (here == '"') return found;
      if (static_cast<unsigned char>(here) < 0x20) fail("a control character in a string");
      if (here != '\\') {
        found += here;
        continue;
      }
      const char escaped = next();
      ++place_;
      switch (escaped) {
        case 'n': found += '\n'; break;
        case 't': found += '\t'; break;
        case 'r': found += '\r'; break;
        case 'b': found += '\b'; break;
        case 'f': found += '\f'; break;
        case '"': case '\\': case '/': found += escaped; break;
        case 'u': append_point(found, code_point()); break;
        default: fail("an unknown escape");
      }
    }
  }

  uint32_t unit() {
    uint32_t found = 0;
    for (int i = 0; i < 4; ++i, ++place_) {
      const char digit = next();
      if (!std::isxdigit(static_cast<unsigned char>(digit))) fail("an escape that is no number");
      found = found * 16 + static_cast<uint32_t>(std::strtol(std::string(1, digit).c_str(), nullptr, 16));
    }
    return found;
  }

  uint32_t code_point() {
    const uint32_t first = unit();
    if (first < 0xd800 || first > 0xdfff) return first;
    if (first > 0xdbff || !word("\\u")) fail("half of a pair");
    const uint32_t second = unit();
    if (second < 0xdc00 || second > 0xdfff) fail("half of a pair");
    return 0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00);
  }

  size_t digits() {
    const size_t begin = place_;
    while (place_ < text_.size() && std::isdigit(static_cast<unsigned char>(text_[place_]))) ++place_;
    if (place_ == begin) fail("no value");
    return place_ - begin;
  }

  bool takes(const char* any) {
    if (place_ >= text_.size() || std::string_view(any).find(text_[place_]) == std::string_view::npos) return false;
    ++place_;
    return true;
  }

  Json numeral() {
    const size_t begin = place_;
    takes("-");
    const bool is_padded = place_ < text_.size() && text_[place_] == '0';
    if (digits() > 1 && is_padded) fail("a number that begins with 0");
    bool is_whole = true;
    if (takes(".")) digits(), is_whole = false;
    if (takes("eE")) takes("+-"), digits(), is_whole = false;
    if (place_ - begin > 40) fail("a number with too many digits");
    const std::string numeral = text_.substr(begin, place_ - begin);
    errno = 0;
    if (is_whole) {
      const long long found = std::strtoll(numeral.c_str(), nullptr, 10);
      if (errno != ERANGE) return Json(static_cast<int64_t>(found));
      if (!rounds_) fail("a number out of range");
    }
    const double found = std::strtod(numeral.c_str(), nullptr);
    if (!std::isfinite(found)) fail("a number out of range");
    return Json(found);
  }

  const std::string& text_;
  const bool rounds_;
  size_t place_ = 0;
  int values_ = 0;
};

void quote(std::string& out, const std::string& text) {
  out += '"';
  for (const char each : text) {
    if (each == '"' || each == '\\') {
      out += '\\';
      out += each;
    } else if (static_cast<unsigned char>(each) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", each);
      out += escaped;
    } else {
      out += each;
    }
  }
  out += '"';
}

template <typename Kind, typename Value>
const Kind& kept(const Value& value, const char* what) {
  if (const Kind* found = std::get_if<Kind>(&value)) return *found;
  throw std::runtime_error(one_line(what) + ": is of another kind than was expected");
}

}  // namespace

Json Json::parse(const std::string& text, LargeNumbers large) {
  return Reader(text, large == LargeNumbers::kRounded).whole();
}

const std::string& Json::text(const char* what) const { return kept<std::string>(value_, what); }
int64_t Json::whole(const char* what) const { return kept<int64_t>(value_, what); }
bool Json::truth(const char* what) const { return kept<bool>(value_, what); }
const Json::List& Json::list(const char* what) const { return kept<List>(value_, what); }
const Json::Members& Json::members(const char* what) const { return kept<Members>(value_, what); }

double Json::number(const char* what) const {
  if (const int64_t* found = std::get_if<int64_t>(&value_)) return static_cast<double>(*found);
  return kept<double>(value_, what);
}

const Json& Json::at(const std::string& name) const {
  for (const auto& [key, value] : members(name.c_str())) {
    if (key == name) return value;
  }
  throw std::runtime_error(one_line(name) + ": is missing");  // a name may come from the file
}

const Json* Json::find(const std::string& name) const {
  for (const auto& [key, value] : members(name.c_str())) {
    if (key == name) return value.is_null() ? nullptr : &value;
  }
  return nullptr;
}

void Json::set(const std::string& name, Json value) {
  auto* found = std::get_if<Members>(&value_);
  if (found == nullptr) throw std::runtime_error(name + ": cannot be set of what is no object");
  for (auto& [key, old] : *found) {
    if (key == name) {
      old = std::move(value);
      return;
    }
  }
  found->emplace_back(name, std::move(value));
}

std::string Json::line() const {
  std::string out;
  write(out);
  return out;
}

void Json::write(std::string& out) const {
  if (is_null()) {
    out += "null";
  } else if (const bool* truth = std::get_if<bool>(&value_)) {
    out += *truth ? "true" : "false";
  } else if (const int64_t* whole = std::get_if<int64_t>(&value_)) {
    out += std::to_string(*whole);
  } else if (const double* number = std::get_if<double>(&value_)) {
    char digits[40];
    std::snprintf(digits, sizeof digits, "%.12g", *number);
    out += std::isfinite(*number) ? digits : "null";
  } else if (const auto* text = std::get_if<std::string>(&value_)) {
    quote(out, *text);
  } else if (const auto* list = std::get_if<List>(&value_)) {
    out += '[';
    for (size_t i = 0; i < list->size(); ++i) {
      if (i > 0) out += ',';
      (*list)[i].write(out);
    }
    out += ']';
  } else {
    out += '{';
    bool first = true;
    for (const auto& [name, value] : std::get<Members>(value_)) {
      if (!first) out += ',';
      first = false;
      quote(out, name);
      out += ':';
      value.write(out);
    }
    out += '}';
  }
}

}  // namespace edgekit
