// Values written out: as Python's str and repr do, and as JSON.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "jinja_text.h"
#include "unicode.h"
#include "utf8.h"

namespace edgekit::jinja {
namespace {

// The shortest digits that read back as the number.
std::string float_text(double number) {
  if (std::isnan(number)) return "nan";
  if (std::isinf(number)) return number > 0 ? "inf" : "-inf";
  char digits[40];
  for (int precision = 1; precision <= 17; ++precision) {
    std::snprintf(digits, sizeof digits, "%.*e", precision - 1, number);
    if (std::strtod(digits, nullptr) == number) break;
  }
  const std::string text(digits);
  const size_t split = text.find('e');
  const int exponent = std::atoi(text.c_str() + split + 1);
  if (exponent < -4 || exponent >= 16) return text;  // C and Python write the exponent alike
  std::string bare = text.substr(0, split);
  const bool is_negative = bare[0] == '-';
  bare.erase(std::remove_if(bare.begin(), bare.end(), [](char each) { return each == '.' || each == '-'; }), bare.end());
  if (exponent < 0) {
    bare = "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + bare;
  } else {
    const auto whole = static_cast<size_t>(exponent) + 1;
    if (bare.size() < whole) bare.append(whole - bare.size(), '0');
    bare.insert(whole, ".");
    if (bare.back() == '.') bare += '0';
  }
  return (is_negative ? "-" : "") + bare;
}

std::string quoted(const std::string& text) {
  const char quote = text.find('\'') != std::string::npos && text.find('"') == std::string::npos ? '"' : '\'';
  std::string made(1, quote);
  for (size_t place = 0; place < text.size();) {
    const uint32_t point = next_point(text, place);
    char escape[8];
    if (point == static_cast<uint32_t>(quote) || point == '\\') made += '\\', made += static_cast<char>(point);
    else if (point == '\n') made += "\\n";
    else if (point == '\r') made += "\\r";
    else if (point == '\t') made += "\\t";
    else if (point < 0x20 || point == 0x7f) std::snprintf(escape, sizeof escape, "\\x%02x", point), made += escape;
    else if (point < 0x7f) made += static_cast<char>(point);
    else if (edgekit::contains(kLetters, point) || edgekit::contains(kNumbers, point)) append_point(made, point);
    else unsupported("a list or an object of symbols beyond ASCII, written without tojson");
  }
  return made + quote;
}

class JsonWriter {
 public:
  JsonWriter(const JsonStyle& style, Budget& budget) : style_(style), budget_(budget) {}

  void write(const Value& value, int depth) {
    const size_t before = made.size();
    if (value.is_none()) made += "null";
    else if (value.is<bool>()) made += value.as<bool>() ? "true" : "false";
    else if (value.is<int64_t>()) made += std::to_string(value.whole());
    else if (value.is<double>()) made += json_float(value.number());
    else if (value.is_text()) write_text(value.text());
    else if (value.sequence() != nullptr && value.sequence()->kind <= Sequence::kTuple) write_list(*value.sequence(), depth);
    else if (value.dict() != nullptr) write_dict(*value.dict(), depth);
    else refuse(std::string("'") + value.kind() + "' cannot be written as JSON");
    if (value.sequence() == nullptr && value.dict() == nullptr) budget_.spend_bytes(made.size() - before);
  }

  std::string made;

 private:
  static std::string json_float(double number) {
    if (std::isnan(number)) return "NaN";
    if (std::isinf(number)) return number > 0 ? "Infinity" : "-Infinity";
    return float_text(number);
  }

  void write_list(const Sequence& list, int depth) {
    made += '[';
    for (size_t place = 0; place < list.items.size(); ++place) {
      separate(place > 0, depth + 1);
      write(list.items[place], depth + 1);
    }
    if (!list.items.empty()) separate(false, depth);
    made += ']';
  }

  void write_dict(const Dict& dict, int depth) {
    std::vector<const std::pair<std::string, Value>*> entries;
    for (const auto& each : dict.entries) entries.push_back(&each);
    const auto by_name = [](const auto* one, const auto* other) { return one->first < other->first; };
    if (style_.sorts_keys) std::sort(entries.begin(), entries.end(), by_name);
    made += '{';
    for (size_t place = 0; place < entries.size(); ++place) {
      separate(place > 0, depth + 1);
      write_text(entries[place]->first);
      made += style_.colon;
      write(entries[place]->second, depth + 1);
    }
    if (!entries.empty()) separate(false, depth);
    made += '}';
  }

  void separate(bool by_comma, int depth) {
    const size_t before = made.size();
    if (by_comma) made += style_.comma;
    if (style_.indent) {
      made += '\n';
      for (int level = 0; level < depth; ++level) made += *style_.indent;
    }
    budget_.spend_bytes(made.size() - before);
  }

  void write_text(const std::string& text) {
    made += '"';
    for (size_t place = 0; place < text.size();) write_point(next_point(text, place));
    made += '"';
  }

  void write_point(uint32_t point) {
    constexpr std::string_view kEscaped = "\"\\\n\r\t\f\b", kLetters = "\"\\nrtfb";
    const size_t found = point < 0x80 ? kEscaped.find(static_cast<char>(point)) : std::string_view::npos;
    if (found != std::string_view::npos) {
      made += '\\';
      made += kLetters[found];
    } else if (point < 0x20 || (style_.is_ascii && point >= 0x7f && point < 0x10000)) {
      write_unit(point);
    } else if (style_.is_ascii && point >= 0x10000) {
      write_unit(0xd800 + ((point - 0x10000) >> 10));
      write_unit(0xdc00 + ((point - 0x10000) & 0x3ff));
    } else {
      append_point(made, point);
    }
  }

  void write_unit(uint32_t unit) {
    char escape[16];
    std::snprintf(escape, sizeof escape, "\\u%04x", unit);
    made += escape;
  }

  const JsonStyle& style_;
  Budget& budget_;
};

}  // namespace

std::string str(const Value& value, Budget& budget) {
  if (value.is_undefined()) return "";
  if (!value.is_text()) return repr(value, budget);
  budget.spend_bytes(value.text().size());
  return value.text();
}

std::string repr(const Value& value, Budget& budget) {
  std::string made;
  if (value.is_undefined()) made = "Undefined";
  else if (value.is_none()) made = "None";
  else if (value.is<bool>()) made = value.as<bool>() ? "True" : "False";
  else if (value.is<int64_t>()) made = std::to_string(value.whole());
  else if (value.is<double>()) made = float_text(value.number());
  else if (value.is_text()) made = quoted(value.text());
  else if (const Dict* dict = value.dict()) {
    for (const auto& each : dict->entries)
      made += (made.empty() ? "" : ", ") + quoted(each.first) + ": " + repr(each.second, budget);
    made = "{" + made + "}";
  } else if (value.sequence() != nullptr && value.sequence()->kind <= Sequence::kTuple) {
    const Sequence& list = *value.sequence();
    for (size_t place = 0; place < list.items.size(); ++place)
      made += (place == 0 ? "" : ", ") + repr(list.items[place], budget);
    if (list.kind == Sequence::kList) made = "[" + made + "]";
    else made = "(" + made + (list.items.size() == 1 ? ",)" : ")");
  } else {
    unsupported(std::string("a '") + value.kind() + "' as text");
  }
  budget.spend_bytes(made.size());
  return made;
}

std::string to_json(const Value& value, const JsonStyle& style, Budget& budget) {
  JsonWriter writer(style, budget);
  writer.write(value, 0);
  return std::move(writer.made);
}

}  // namespace edgekit::jinja
