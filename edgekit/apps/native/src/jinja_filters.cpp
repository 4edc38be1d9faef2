// Filters of single values; those that go through lists are in jinja_list_filters.cpp.
#include <cmath>
#include <cstdlib>
#include <map>

#include "jinja_functions.h"
#include "jinja_text.h"

namespace edgekit::jinja {
namespace {

using Filter = Value (*)(const Value& of, const Arguments& given, Budget& budget);

// Of texts, lists and objects, as Python's len.
Value length(const Value& of, const Arguments& given, Budget& budget) {
  given.bound("length", {});
  if (of.is_undefined()) return Value(int64_t{0});
  if (of.is_text()) {
    budget.spend_bytes(of.text().size());
    return Value(static_cast<int64_t>(count_points(of.text())));
  }
  if (of.dict() != nullptr) return Value(static_cast<int64_t>(of.dict()->entries.size()));
  if (of.sequence() != nullptr && of.sequence()->kind != Sequence::kIterator)
    return Value(static_cast<int64_t>(of.sequence()->items.size()));
  refuse(std::string("'") + of.kind() + "' has no length");
}

Value trim(const Value& of, const Arguments& given, Budget& budget) {
  const Value* letters = given.bound("trim", {"chars"})[0];
  const std::string text = str(of, budget);
  if (letters == nullptr || letters->is_none()) return Value(std::string(stripped(text, true, true)));
  return Value(std::string(stripped(text, text_or(letters, ""), true, true)));
}

template <typename Change>
Value changed(const char* name, const Value& of, const Arguments& given, Budget& budget, Change&& change) {
  given.bound(name, {});
  return Value(std::string(change(str(of, budget))));
}

Value otherwise(const Value& of, const Arguments& given, Budget&) {
  const auto bound = given.bound("default", {"default_value", "boolean"});
  const bool is_replaced = of.is_undefined() || (truth_or(bound[1], false) && !of.truth());
  if (!is_replaced) return of;
  return bound[0] == nullptr ? Value(std::string()) : *bound[0];
}

Value replaced_in(const Value& of, const Arguments& given, Budget& budget) {
  const auto bound = given.bound("replace", {"old", "new", "count"});
  if (bound[0] == nullptr || bound[1] == nullptr) refuse("'replace' takes two texts");
  const int64_t most = bound[2] == nullptr || bound[2]->is_none() ? -1 : whole_or(bound[2], -1);
  const std::string text = str(of, budget), old = str(*bound[0], budget);
  budget.spend_search(text.size(), old.size());
  return Value(replaced(text, old, str(*bound[1], budget), most, budget));
}

Value indented(const Value& of, const Arguments& given, Budget& budget) {
  const auto bound = given.bound("indent", {"width", "first", "blank"});
  if (!of.is_text()) refuse("'indent' takes a text");
  const bool is_text = bound[0] != nullptr && bound[0]->is_text();
  const int64_t width = is_text ? 0 : whole_or(bound[0], 4);
  budget.spend_bytes(static_cast<size_t>(std::max<int64_t>(width, 0)));
  const std::string before = is_text ? bound[0]->text() : std::string(static_cast<size_t>(std::max<int64_t>(width, 0)), ' ');
  const std::vector<std::string> lines = lines_of(of.text() + "\n", budget);
  const bool with_blank = truth_or(bound[2], false);
  std::string made = truth_or(bound[1], false) ? before : "";
  for (size_t line = 0; line < lines.size(); ++line) {
    budget.spend_bytes(before.size() + lines[line].size());
    if (line > 0) made += "\n" + (lines[line].empty() && !with_blank ? "" : before);
    made += lines[line];
  }
  return Value(std::move(made));
}

// A number in a text, as Python reads it; false: it is none.
bool read_number(const std::string& text, int64_t& whole, double& number, bool& is_whole) {
  const std::string digits(stripped(text, true, true));
  if (digits.find_first_not_of("0123456789+-.eE") != std::string::npos) {
    const bool is_plain = digits.find_first_of("0123456789nN_") == std::string::npos;
    if (is_plain) return false;
    unsupported("a text such as " + quote_short(digits) + " as a number");
  }
  if (digits.empty()) return false;
  char* end = nullptr;
  errno = 0;
  whole = std::strtoll(digits.c_str(), &end, 10);
  is_whole = *end == '\0';
  if (is_whole && errno == ERANGE) unsupported("a number beyond 64 bits");
  number = std::strtod(digits.c_str(), &end);
  return *end == '\0';
}

Value to_whole(const Value& of, const Arguments& given, Budget&) {
  const auto bound = given.bound("int", {"default"});
  if (of.is_undefined()) refuse("something undefined is no number");
  const Value none = bound[0] == nullptr ? Value(int64_t{0}) : *bound[0];
  if (of.is_whole()) return Value(of.whole());
  int64_t whole = 0;
  double number = 0.0;
  bool is_whole = false;
  if (of.is<double>()) number = of.number();
  else if (!of.is_text() || !read_number(of.text(), whole, number, is_whole)) return none;
  if (is_whole) return Value(whole);
  if (!(std::fabs(number) < 9e18)) unsupported("a number beyond 64 bits");
  return Value(static_cast<int64_t>(number));
}

Value to_float(const Value& of, const Arguments& given, Budget&) {
  const auto bound = given.bound("float", {"default"});
  if (of.is_undefined()) refuse("something undefined is no number");
  const Value none = bound[0] == nullptr ? Value(0.0) : *bound[0];
  if (of.is_number()) return Value(of.number());
  int64_t whole = 0;
  double number = 0.0;
  bool is_whole = false;
  return of.is_text() && read_number(of.text(), whole, number, is_whole) ? Value(number) : none;
}

Value absolute(const Value& of, const Arguments& given, Budget& budget) {
  given.bound("abs", {});
  if (!of.is_number()) refuse("'abs' takes a number");
  return less(of, Value(int64_t{0}), budget) ? negated(of) : of.is<bool>() ? Value(of.whole()) : of;
}

Value json_of(const Value& of, const Arguments& given, Budget& budget) {
  const auto bound = given.bound("tojson", {"ensure_ascii", "indent", "separators", "sort_keys"});
  JsonStyle style;
  style.is_ascii = truth_or(bound[0], false);
  style.sorts_keys = truth_or(bound[3], false);
  if (bound[1] != nullptr && !bound[1]->is_none()) {
    if (bound[1]->is_text()) {
      style.indent = bound[1]->text();
    } else {
      const auto width = static_cast<size_t>(std::max<int64_t>(whole_or(bound[1], 0), 0));
      budget.spend_bytes(width);
      style.indent = std::string(width, ' ');
    }
    style.comma = ",";
  }
  if (bound[2] != nullptr && !bound[2]->is_none()) {
    const Sequence* pair = bound[2]->sequence();
    if (pair == nullptr || pair->items.size() != 2) refuse("the separators of 'tojson' are two texts");
    style.comma = text_or(&pair->items[0], ""), style.colon = text_or(&pair->items[1], "");
  }
  return Value(to_json(of, style, budget));
}

const std::map<std::string, Filter>& filters() {
  static const std::map<std::string, Filter> all = {
      {"length", length},
      {"count", length},
      {"trim", trim},
      {"default", otherwise},
      {"d", otherwise},
      {"replace", replaced_in},
      {"indent", indented},
      {"int", to_whole},
      {"float", to_float},
      {"abs", absolute},
      {"tojson", json_of},
      {"string", [](const Value& of, const Arguments& given, Budget& budget) {
         return changed("string", of, given, budget, [](std::string text) { return text; });
       }},
      {"upper", [](const Value& of, const Arguments& given, Budget& budget) {
         return changed("upper", of, given, budget, upper);
       }},
      {"lower", [](const Value& of, const Arguments& given, Budget& budget) {
         return changed("lower", of, given, budget, lower);
       }},
      {"capitalize", [](const Value& of, const Arguments& given, Budget& budget) {
         return changed("capitalize", of, given, budget, capitalized);
       }},
      {"title", [](const Value& of, const Arguments& given, Budget& budget) {
         return changed("title", of, given, budget, title);
       }},
  };
  return all;
}

}  // namespace

Value filtered(const std::string& name, const Value& of, const Arguments& arguments, Budget& budget) {
  budget.spend(1);
  const auto found = filters().find(name);
  return found == filters().end() ? filtered_list(name, of, arguments, budget) : found->second(of, arguments, budget);
}

}  // namespace edgekit::jinja
