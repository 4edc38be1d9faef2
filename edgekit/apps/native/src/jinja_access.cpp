// Attributes, items and slices, which a template looks up as Jinja's sandbox does.
#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "jinja_functions.h"
#include "jinja_text.h"
#include "utf8.h"

namespace edgekit::jinja {
namespace {

// The names that Python's own types have: these come before the keys of an object.
const std::map<std::string, std::set<std::string>>& python_names() {
  static const std::map<std::string, std::set<std::string>> names = {
      {"str",
       {"capitalize", "casefold", "center", "count", "encode", "endswith", "expandtabs", "find", "format",
        "format_map", "index", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower",
        "isnumeric", "isprintable", "isspace", "istitle", "isupper", "join", "ljust", "lower", "lstrip", "maketrans",
        "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rjust", "rpartition", "rsplit",
        "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "translate", "upper", "zfill"}},
      {"list",
       {"append", "clear", "copy", "count", "extend", "index", "insert", "pop", "remove", "reverse", "sort"}},
      {"tuple", {"count", "index"}},
      {"range", {"count", "index", "start", "step", "stop"}},
      {"dict",
       {"clear", "copy", "fromkeys", "get", "items", "keys", "pop", "popitem", "setdefault", "update", "values"}},
      {"int",
       {"as_integer_ratio", "bit_count", "bit_length", "conjugate", "denominator", "from_bytes", "imag", "is_integer",
        "numerator", "real", "to_bytes"}},
      {"float", {"as_integer_ratio", "conjugate", "fromhex", "hex", "imag", "is_integer", "real"}}};
  return names;
}

Value loop_attribute(const Value& of, const std::string& name) {
  const Loop& loop = *of.as<std::shared_ptr<const Loop>>();
  const size_t size = loop.items->items.size();
  const auto whole = [](size_t value) { return Value(static_cast<int64_t>(value)); };
  if (name == "index") return whole(loop.place + 1);
  if (name == "index0") return whole(loop.place);
  if (name == "revindex") return whole(size - loop.place);
  if (name == "revindex0") return whole(size - loop.place - 1);
  if (name == "first") return Value(loop.place == 0);
  if (name == "last") return Value(loop.place + 1 == size);
  if (name == "length") return whole(size);
  if (name == "depth") return whole(1);
  if (name == "depth0") return whole(0);
  if (name == "previtem") return loop.place == 0 ? Value() : loop.items->items[loop.place - 1];
  if (name == "nextitem") return loop.place + 1 == size ? Value() : loop.items->items[loop.place + 1];
  if (name == "cycle") return Value(std::make_shared<const Method>(Method{of, name}));
  unsupported("the attribute " + quote_short(name) + " of a loop");
}

// An attribute of Python's, or of a namespace.
std::optional<Value> own_attribute(const Value& of, const std::string& name, Budget& budget) {
  if (name.substr(0, 2) == "__") unsupported("the attribute " + quote_short(name));
  if (of.is_none()) return std::nullopt;
  if (of.is<Namespace*>()) {
    const Value* found = find(of.as<Namespace*>()->entries, name, budget);
    return found == nullptr ? std::nullopt : std::optional(*found);
  }
  if (of.is<std::shared_ptr<const Loop>>()) return loop_attribute(of, name);
  const auto known = python_names().find(of.is<bool>() ? "int" : of.kind());
  if (known == python_names().end()) unsupported("an attribute of '" + std::string(of.kind()) + "'");
  if (known->second.count(name) == 0) return std::nullopt;
  return Value(std::make_shared<const Method>(Method{of, name}));
}

std::optional<size_t> place_in(size_t size, int64_t index) {
  const auto most = static_cast<int64_t>(size);
  if (index < -most || index >= most) return std::nullopt;
  return static_cast<size_t>(index < 0 ? index + most : index);
}

// Where each character begins, and the end.
std::vector<size_t> point_places(const std::string& text, Budget& budget) {
  budget.spend(1 + text.size() / 2);
  std::vector<size_t> found;
  for (size_t place = 0; place < text.size(); next_point(text, place)) found.push_back(place);
  found.push_back(text.size());
  return found;
}

std::optional<Value> own_item(const Value& of, const Value& place, Budget& budget) {
  if (const Dict* dict = of.dict()) {
    const Value* found = place.is_text() ? find(dict->entries, place.text(), budget) : nullptr;
    return found == nullptr ? std::nullopt : std::optional(*found);
  }
  if (!place.is_whole()) return std::nullopt;
  if (of.is_text()) {
    const std::vector<size_t> places = point_places(of.text(), budget);
    const std::optional<size_t> index = place_in(places.size() - 1, place.whole());
    if (!index) return std::nullopt;
    return Value(of.text().substr(places[*index], places[*index + 1] - places[*index]));
  }
  const Sequence* list = of.sequence();
  if (list == nullptr || list->kind > Sequence::kRange) return std::nullopt;
  const std::optional<size_t> index = place_in(list->items.size(), place.whole());
  return index ? std::optional(list->items[*index]) : std::nullopt;
}

void refuse_undefined(const Value& of, const std::string& what) {
  if (of.is_undefined()) refuse("something undefined has no " + what);
}

// The places that Python's slice takes.
std::vector<size_t> slice_places(size_t size, const Value& first, const Value& end, const Value& step) {
  for (const Value* each : {&first, &end, &step}) {
    if (!each->is_none() && !each->is_whole()) refuse("a slice takes whole numbers");
  }
  const int64_t by = step.is_none() ? 1 : step.whole(), most = static_cast<int64_t>(size);
  if (by == 0) refuse("the step of a slice is 0");
  const auto bounded = [&](const Value& given, int64_t otherwise) {
    if (given.is_none()) return otherwise;
    const int64_t place = given.whole() < 0 ? std::max<int64_t>(given.whole(), -most - 1) + most : given.whole();
    return by > 0 ? std::clamp<int64_t>(place, 0, most) : std::clamp<int64_t>(place, -1, most - 1);
  };
  const int64_t begin = bounded(first, by > 0 ? 0 : most - 1), stop = bounded(end, by > 0 ? most : -1);
  std::vector<size_t> found;
  for (int64_t place = begin; by > 0 ? place < stop : place > stop;) {
    found.push_back(static_cast<size_t>(place));
    if (by > most || by < -most) break;
    place += by;
  }
  return found;
}

}  // namespace

Value attribute_of(const Value& of, const std::string& name, Budget& budget) {
  refuse_undefined(of, "attribute " + quote_short(name));
  if (const std::optional<Value> found = own_attribute(of, name, budget)) return *found;
  return own_item(of, Value(name), budget).value_or(Value());
}

Value item_of(const Value& of, const Value& place, Budget& budget) {
  refuse_undefined(of, "item");
  if (const std::optional<Value> found = own_item(of, place, budget)) return *found;
  if (!place.is_text()) return Value();
  return own_attribute(of, place.text(), budget).value_or(Value());
}

Value slice_of(const Value& of, const Value& first, const Value& end, const Value& step, Budget& budget) {
  if (of.is_text()) {
    const std::vector<size_t> places = point_places(of.text(), budget);
    std::string made;
    for (const size_t place : slice_places(places.size() - 1, first, end, step))
      made.append(of.text(), places[place], places[place + 1] - places[place]);
    return Value(std::move(made));
  }
  const Sequence* list = of.sequence();
  if (list == nullptr || list->kind > Sequence::kRange) unsupported(std::string("a slice of '") + of.kind() + "'");
  Values items;
  for (const size_t place : slice_places(list->items.size(), first, end, step)) items.push_back(list->items[place]);
  return make_sequence(list->kind, std::move(items), budget);
}

}  // namespace edgekit::jinja
