// Methods of texts, lists and objects, and the functions that every template has.
#include <algorithm>
#include <ctime>
#include <functional>
#include <map>

#include "jinja_functions.h"
#include "jinja_text.h"

namespace edgekit::jinja {
namespace {

constexpr int64_t kLongestRange = 100'000;
constexpr size_t kMostDate = 1024;

const std::string& text_of(const Value* given, const char* what) {
  if (given == nullptr || !given->is_text()) refuse(std::string(what) + " takes a text");
  return given->text();
}

Value texts(std::vector<std::string> all, Budget& budget) {
  Values items;
  for (std::string& each : all) items.emplace_back(std::move(each));
  return make_sequence(Sequence::kList, std::move(items), budget);
}

Value stripped_of(const std::string& text, const Value* letters, bool left, bool right) {
  if (letters == nullptr || letters->is_none()) return Value(std::string(stripped(text, left, right)));
  return Value(std::string(stripped(text, text_of(letters, "'strip'"), left, right)));
}

bool is_at(const std::string& text, const std::string& part, bool at_begin) {
  if (part.size() > text.size()) return false;
  return text.compare(at_begin ? 0 : text.size() - part.size(), part.size(), part) == 0;
}

bool is_at(const std::string& text, const Value* part, bool at_begin) {
  const Sequence* several = part == nullptr ? nullptr : part->sequence();
  if (several == nullptr || several->kind != Sequence::kTuple) return is_at(text, text_of(part, "'startswith'"), at_begin);
  return std::any_of(several->items.begin(), several->items.end(),
                     [&](const Value& each) { return is_at(text, text_of(&each, "'startswith'"), at_begin); });
}

Value parted(const std::string& text, const std::string& separator, bool from_right, Budget& budget) {
  if (separator.empty()) refuse("empty separator");
  const size_t place = from_right ? text.rfind(separator) : text.find(separator);
  Values parts{Value(text), Value(std::string()), Value(std::string())};
  if (place != std::string::npos) {
    parts = {Value(text.substr(0, place)), Value(separator), Value(text.substr(place + separator.size()))};
  } else if (from_right) {
    std::swap(parts[0], parts[2]);
  }
  return make_sequence(Sequence::kTuple, std::move(parts), budget);
}

std::string title_of_words(std::string text) {  // str.title: each run of letters
  text = lower(std::move(text));
  bool begins = true;
  for (char& each : text) {
    const bool is_letter = each >= 'a' && each <= 'z';
    if (is_letter && begins) each = static_cast<char>(each - 32);
    begins = !is_letter;
  }
  return text;
}

std::string joined(const std::string& separator, const Value* parts, Budget& budget) {
  if (parts == nullptr) refuse("'join' takes a list");
  std::string made;
  const std::shared_ptr<Sequence> all = iterated(*parts, budget);
  for (size_t place = 0; place < all->items.size(); ++place) {
    budget.spend_bytes(separator.size());
    if (place > 0) made += separator;
    made += text_of(&all->items[place], "'join'");
    budget.spend_bytes(all->items[place].text().size());
  }
  return made;
}

using TextMethod = std::function<Value(const std::string&, const Arguments&, Budget&)>;

Value counted(const std::string& text, const std::string& part) {
  if (part.empty()) unsupported("'count' of nothing");
  int64_t count = 0;
  for (size_t place = text.find(part); place != std::string::npos; place = text.find(part, place + part.size())) ++count;
  return Value(count);
}

Value found_at(const std::string& text, size_t place) {
  return Value(place == std::string::npos ? int64_t{-1} : static_cast<int64_t>(count_points({text.data(), place})));
}

const std::map<std::string, TextMethod>& text_methods() {
  const auto strip = [](const char* name, bool left, bool right) {
    return TextMethod([=](const std::string& text, const Arguments& given, Budget&) {
      return stripped_of(text, given.bound(name, {""})[0], left, right);
    });
  };
  const auto plain = [](const char* name, std::string (*change)(std::string)) {
    return TextMethod([=](const std::string& text, const Arguments& given, Budget&) {
      given.bound(name, {});
      return Value(change(text));
    });
  };
  const auto search = [](const char* name, Value (*look)(const std::string&, const std::string&)) {
    return TextMethod([=](const std::string& text, const Arguments& given, Budget&) {
      return look(text, text_of(given.bound(name, {""})[0], name));
    });
  };
  const auto at = [](const char* name, bool at_begin) {
    return TextMethod([=](const std::string& text, const Arguments& given, Budget&) {
      return Value(is_at(text, given.bound(name, {""})[0], at_begin));
    });
  };
  static const std::map<std::string, TextMethod> methods = {
      {"strip", strip("strip", true, true)},
      {"lstrip", strip("lstrip", true, false)},
      {"rstrip", strip("rstrip", false, true)},
      {"upper", plain("upper", upper)},
      {"lower", plain("lower", lower)},
      {"title", plain("title", title_of_words)},
      {"capitalize", plain("capitalize", [](std::string text) { return capitalized(text); })},
      {"startswith", at("startswith", true)},
      {"endswith", at("endswith", false)},
      {"count", search("count", counted)},
      {"find", search("find", [](const std::string& text, const std::string& part) { return found_at(text, text.find(part)); })},
      {"rfind", search("rfind", [](const std::string& text, const std::string& part) { return found_at(text, text.rfind(part)); })},
      {"removeprefix", search("removeprefix", [](const std::string& text, const std::string& part) {
         return Value(is_at(text, part, true) ? text.substr(part.size()) : text);
       })},
      {"removesuffix", search("removesuffix", [](const std::string& text, const std::string& part) {
         return Value(is_at(text, part, false) ? text.substr(0, text.size() - part.size()) : text);
       })},
      {"isspace", [](const std::string& text, const Arguments& given, Budget&) {
         given.bound("isspace", {});
         return Value(!text.empty() && stripped(text, true, false).empty());
       }},
      {"split", [](const std::string& text, const Arguments& given, Budget& budget) {
         const auto bound = given.bound("split", {"sep", "maxsplit"});
         const bool by_space = bound[0] == nullptr || bound[0]->is_none();
         const int64_t most = whole_or(bound[1], -1);
         if (by_space) return texts(parts_of(text, std::nullopt, most, budget), budget);
         return texts(parts_of(text, text_of(bound[0], "'split'"), most, budget), budget);
       }},
      {"rsplit", [](const std::string& text, const Arguments& given, Budget& budget) {
         const auto bound = given.bound("rsplit", {"sep", "maxsplit"});
         if (bound[0] == nullptr || bound[0]->is_none()) unsupported("'rsplit' by white space");
         return texts(parts_from_the_right(text, text_of(bound[0], "'rsplit'"), whole_or(bound[1], -1), budget), budget);
       }},
      {"splitlines", [](const std::string& text, const Arguments& given, Budget& budget) {
         given.bound("splitlines", {});
         return texts(lines_of(text, budget), budget);
       }},
      {"replace", [](const std::string& text, const Arguments& given, Budget& budget) {
         const auto bound = given.bound("replace", {"", "", ""});
         return Value(replaced(text, text_of(bound[0], "'replace'"), text_of(bound[1], "'replace'"), whole_or(bound[2], -1), budget));
       }},
      {"join", [](const std::string& text, const Arguments& given, Budget& budget) {
         return Value(joined(text, given.bound("join", {""})[0], budget));
       }},
      {"partition", [](const std::string& text, const Arguments& given, Budget& budget) {
         return parted(text, text_of(given.bound("partition", {""})[0], "'partition'"), false, budget);
       }},
      {"rpartition", [](const std::string& text, const Arguments& given, Budget& budget) {
         return parted(text, text_of(given.bound("rpartition", {""})[0], "'rpartition'"), true, budget);
       }},
  };
  return methods;
}

Value of_dict(const Dict& dict, const std::string& name, const Arguments& given, Budget& budget) {
  if (name == "get") {
    const auto bound = given.bound("get", {"", ""});
    if (bound[0] == nullptr || bound[0]->sequence() != nullptr || bound[0]->dict() != nullptr) refuse("'get' takes a key");
    const Value* found = bound[0]->is_text() ? find(dict.entries, bound[0]->text(), budget) : nullptr;
    return found != nullptr ? *found : bound[1] != nullptr ? *bound[1] : Value::none();
  }
  if (name != "items" && name != "keys" && name != "values") unsupported("the method " + quote_short(name) + " of an object");
  given.bound(name, {});
  Values items;
  for (const auto& [key, value] : dict.entries) {
    if (name == "items") items.push_back(make_sequence(Sequence::kTuple, {Value(key), value}, budget));
    else items.push_back(name == "keys" ? Value(key) : value);
  }
  return make_sequence(Sequence::kView, std::move(items), budget);
}

Value of_list(const Sequence& list, const std::string& name, const Arguments& given, Budget& budget) {
  if (name != "count" && name != "index") unsupported("the method " + quote_short(name) + " of a list");
  const Value* wanted = given.bound(name, {""})[0];
  if (wanted == nullptr) refuse(quote_short(name) + " takes a value");
  const auto is_equal = [&](const Value& each) { return equal(each, *wanted, budget); };
  if (name == "count") return Value(int64_t{std::count_if(list.items.begin(), list.items.end(), is_equal)});
  const auto found = std::find_if(list.items.begin(), list.items.end(), is_equal);
  if (found == list.items.end()) refuse("the value is not in the list");
  return Value(int64_t{found - list.items.begin()});
}

Value range_of(const Arguments& given, Budget& budget) {
  const auto bound = given.bound("range", {"", "", ""});
  if (bound[0] == nullptr) refuse("'range' takes a number");
  int64_t begin = whole_or(bound[0], 0), end = whole_or(bound[1], 0);
  const int64_t step = whole_or(bound[2], 1);
  if (bound[1] == nullptr) end = std::exchange(begin, 0);
  if (step == 0) refuse("the step of 'range' is 0");
  Values items;
  for (int64_t each = begin; step > 0 ? each < end : each > end;) {
    if (static_cast<int64_t>(items.size()) >= kLongestRange) refuse("a range of more than 100,000 numbers");
    budget.spend(4);
    items.emplace_back(each);
    if (__builtin_add_overflow(each, step, &each)) break;
  }
  return make_sequence(Sequence::kRange, std::move(items), budget);
}

Value date_now(const std::string& format) {
  if (format.empty()) return Value(std::string());
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  std::string made(kMostDate, '\0');
  const size_t size = std::strftime(made.data(), made.size(), format.c_str(), &local);
  if (size == 0 || format.find('\0') != std::string::npos || format.find("%f") != std::string::npos)
    unsupported("the format " + quote_short(format) + " of a date");
  made.resize(size);
  return Value(std::move(made));
}

}  // namespace

Value called_method(const Method& method, const Arguments& given, Budget& budget) {
  const Value& of = method.of;
  if (of.is_text()) {
    const auto found = text_methods().find(method.name);
    if (found == text_methods().end()) unsupported("the method " + quote_short(method.name) + " of a text");
    budget.spend_bytes(of.text().size());
    for (const Value& each : given.places) {
      if (each.is_text()) budget.spend_search(of.text().size(), each.text().size());
    }
    return found->second(of.text(), given, budget);
  }
  if (of.dict() != nullptr) return of_dict(*of.dict(), method.name, given, budget);
  if (of.sequence() != nullptr && of.sequence()->kind <= Sequence::kTuple)
    return of_list(*of.sequence(), method.name, given, budget);
  if (of.is<std::shared_ptr<const Loop>>()) {  // cycle
    if (given.places.empty() || !given.named.empty()) refuse("'cycle' takes values");
    return given.places[of.as<std::shared_ptr<const Loop>>()->place % given.places.size()];
  }
  unsupported("the method " + quote_short(method.name) + " of '" + of.kind() + "'");
}

bool is_global(const std::string& name) {
  constexpr const char* kNames[] = {"range",  "dict",      "lipsum",          "cycler",
                                    "joiner", "namespace", "raise_exception", "strftime_now"};
  return std::any_of(std::begin(kNames), std::end(kNames), [&](const char* each) { return name == each; });
}

Value called_global(const std::string& name, const Arguments& given, Budget& budget) {
  if (name == "range") return range_of(given, budget);
  if (name == "raise_exception") {
    const Value* message = given.bound(name, {"message"})[0];
    refuse(message == nullptr ? "'raise_exception' takes a message" : str(*message, budget));
  }
  if (name == "strftime_now") return date_now(text_of(given.bound(name, {"format"})[0], "'strftime_now'"));
  if (name != "dict") unsupported("the function " + quote_short(name));
  std::vector<std::pair<std::string, Value>> entries;
  if (given.places.size() > 1) refuse("'dict' takes one object");
  if (!given.places.empty()) {
    if (given.places[0].dict() == nullptr) unsupported("'dict' of other than an object");
    entries = given.places[0].dict()->entries;
  }
  for (const auto& [key, value] : given.named) set(entries, key, value, budget);
  return make_dict(std::move(entries), budget);
}

}  // namespace edgekit::jinja
