// Filters that go through lists.
#include <algorithm>
#include <map>

#include "jinja_functions.h"
#include "jinja_text.h"

namespace edgekit::jinja {
namespace {

using Filter = Value (*)(const Value& of, const Arguments& given, Budget& budget);

// `a.b.0` of a value; with `otherwise` where a part is undefined.
Value path_of(Value of, const Value& path, const Value* otherwise, Budget& budget) {
  if (!path.is_text()) return item_of(of, path, budget);
  for (const std::string& part : parts_of(path.text(), ".", -1, budget)) {
    const bool is_place = !part.empty() && part.size() < 10 && part.find_first_not_of("0123456789") == std::string::npos;
    of = item_of(of, is_place ? Value(int64_t{std::stoll(part)}) : Value(part), budget);
    if (otherwise != nullptr && !otherwise->is_none() && of.is_undefined()) of = *otherwise;
  }
  return of;
}

const Value* named(const Arguments& given, const char* name) {
  for (const auto& each : given.named) {
    if (each.first == name) return &each.second;
  }
  return nullptr;
}

// The arguments behind the first `count`.
Arguments behind(const Arguments& given, size_t count) {
  Arguments rest = given;
  rest.places.erase(rest.places.begin(), rest.places.begin() + static_cast<long>(std::min(count, rest.places.size())));
  return rest;
}

Value iterator(Values items, Budget& budget) { return make_sequence(Sequence::kIterator, std::move(items), budget); }

Value map(const Value& of, const Arguments& given, Budget& budget) {
  Values made;
  const Value *attribute = named(given, "attribute"), *missing = named(given, "default");
  if (given.places.empty() ? attribute == nullptr || given.named.size() > (missing ? 2 : 1) : attribute != nullptr)
    unsupported("these arguments of 'map'");
  const Arguments rest = behind(given, 1);
  const std::shared_ptr<Sequence> all = iterated(of, budget);
  for (const Value& each : all->items) {
    made.push_back(given.places.empty() ? path_of(each, *attribute, missing, budget)
                                        : filtered(text_or(&given.places[0], ""), each, rest, budget));
  }
  return iterator(std::move(made), budget);
}

// select, reject, selectattr and rejectattr.
Value selected(const Value& of, const Arguments& given, bool by_attribute, bool is_kept, Budget& budget) {
  const size_t first = by_attribute ? 1 : 0;
  if (given.places.size() < first) refuse("'selectattr' takes the name of an attribute");
  const Arguments rest = behind(given, first + 1);
  Values made;
  const std::shared_ptr<Sequence> all = iterated(of, budget);
  for (const Value& each : all->items) {
    const Value looked = by_attribute ? path_of(each, given.places[0], nullptr, budget) : each;
    const bool holds = given.places.size() == first
                           ? looked.truth()
                           : tested(text_or(&given.places[first], ""), looked, rest, budget);
    if (holds == is_kept) made.push_back(each);
  }
  return iterator(std::move(made), budget);
}

// What is compared where letters' cases are not told apart.
Value folded(const Value& of, bool tells_cases, Budget& budget) {
  return of.is_text() && !tells_cases ? Value(lower(str(of, budget))) : of;
}

Values sorted_by(const Values& items, const std::vector<Value>& keys, bool is_reversed, Budget& budget) {
  std::vector<size_t> order(items.size());
  for (size_t place = 0; place < order.size(); ++place) order[place] = place;
  const auto before = [&](size_t one, size_t other) {
    return is_reversed ? less(keys[other], keys[one], budget) : less(keys[one], keys[other], budget);
  };
  for (size_t place = 1; place < order.size(); ++place) before(place - 1, place);  // kinds without an order are refused
  std::stable_sort(order.begin(), order.end(), before);
  Values found;
  for (const size_t place : order) found.push_back(items[place]);
  return found;
}

Value sorted(const Value& of, const Arguments& given, Budget& budget) {
  const auto bound = given.bound("sort", {"reverse", "case_sensitive", "attribute"});
  const std::shared_ptr<Sequence> all = iterated(of, budget);
  std::vector<Value> keys;
  for (const Value& each : all->items) {
    const bool by_path = bound[2] != nullptr && !bound[2]->is_none();
    if (by_path && bound[2]->is_text() && bound[2]->text().find(',') != std::string::npos)
      unsupported("'sort' by several attributes");
    keys.push_back(folded(by_path ? path_of(each, *bound[2], nullptr, budget) : each, truth_or(bound[1], false), budget));
  }
  return make_sequence(Sequence::kList, sorted_by(all->items, keys, truth_or(bound[0], false), budget), budget);
}

Value dict_sorted(const Value& of, const Arguments& given, Budget& budget) {
  const auto bound = given.bound("dictsort", {"case_sensitive", "by", "reverse"});
  const std::string by = text_or(bound[1], "key");
  if (of.dict() == nullptr) refuse("'dictsort' takes an object");
  if (by != "key" && by != "value") refuse("'dictsort' sorts by 'key' or 'value'");
  Values items;
  std::vector<Value> keys;
  for (const auto& [name, value] : of.dict()->entries) {
    items.push_back(make_sequence(Sequence::kTuple, {Value(name), value}, budget));
    keys.push_back(folded(by == "key" ? Value(name) : value, truth_or(bound[0], false), budget));
  }
  return make_sequence(Sequence::kList, sorted_by(items, keys, truth_or(bound[2], false), budget), budget);
}

Value unique(const Value& of, const Arguments& given, Budget& budget) {
  const auto bound = given.bound("unique", {"case_sensitive", "attribute"});
  Values found, keys;
  const std::shared_ptr<Sequence> all = iterated(of, budget);
  for (const Value& each : all->items) {
    const Value looked = bound[1] == nullptr ? each : path_of(each, *bound[1], nullptr, budget);
    const Value key = folded(looked, truth_or(bound[0], false), budget);
    if (!key.is_text() && !key.is_number() && !key.is_none()) unsupported("'unique' of lists and objects");
    if (std::any_of(keys.begin(), keys.end(), [&](const Value& seen) { return equal(seen, key, budget); })) continue;
    keys.push_back(key), found.push_back(each);
  }
  return iterator(std::move(found), budget);
}

Value joined(const Value& of, const Arguments& given, Budget& budget) {
  const auto bound = given.bound("join", {"d", "attribute"});
  const std::string between = bound[0] == nullptr ? "" : str(*bound[0], budget);
  const bool by_path = bound[1] != nullptr && !bound[1]->is_none();
  std::string made;
  bool is_first = true;
  const std::shared_ptr<Sequence> all = iterated(of, budget);
  for (const Value& each : all->items) {
    budget.spend_bytes(between.size());
    made += (is_first ? "" : between) + str(by_path ? path_of(each, *bound[1], nullptr, budget) : each, budget);
    is_first = false;
  }
  return Value(std::move(made));
}

Value reversed(const Value& of, const Arguments& given, Budget& budget) {
  given.bound("reverse", {});
  if (of.is_text()) return slice_of(of, Value::none(), Value::none(), Value(int64_t{-1}), budget);
  const bool is_iterator = of.sequence() != nullptr && of.sequence()->kind == Sequence::kIterator;
  Values items = iterated(of, budget)->items;
  std::reverse(items.begin(), items.end());
  return make_sequence(is_iterator ? Sequence::kList : Sequence::kIterator, std::move(items), budget);
}

Value first(const Value& of, const Arguments& given, Budget& budget) {
  given.bound("first", {});
  if (of.sequence() != nullptr && of.sequence()->kind == Sequence::kIterator) {  // the others stay in it
    Values& left = of.as<std::shared_ptr<Sequence>>()->items;
    if (left.empty()) return Value();
    budget.spend(left.size() / 8);
    const Value found = left.front();
    left.erase(left.begin());
    return found;
  }
  const std::shared_ptr<Sequence> all = iterated(of, budget);
  return all->items.empty() ? Value() : all->items.front();
}

Value last(const Value& of, const Arguments& given, Budget& budget) {
  given.bound("last", {});
  if (of.sequence() != nullptr && of.sequence()->kind == Sequence::kIterator) refuse("'last' of a generator");
  const std::shared_ptr<Sequence> all = iterated(of, budget);
  return all->items.empty() ? Value() : all->items.back();
}

Value listed(const Value& of, const Arguments& given, Budget& budget) {
  given.bound("list", {});
  return make_sequence(Sequence::kList, iterated(of, budget)->items, budget);
}

Value items(const Value& of, const Arguments& given, Budget& budget) {
  given.bound("items", {});
  if (of.is_undefined()) return iterator({}, budget);
  if (of.dict() == nullptr) refuse("'items' takes an object");
  return iterator(iterated(called_method({of, "items"}, {}, budget), budget)->items, budget);
}

Value summed(const Value& of, const Arguments& given, Budget& budget) {
  const auto bound = given.bound("sum", {"attribute", "start"});
  Value found = bound[1] == nullptr ? Value(int64_t{0}) : *bound[1];
  const bool by_path = bound[0] != nullptr && !bound[0]->is_none();
  const std::shared_ptr<Sequence> all = iterated(of, budget);
  for (const Value& each : all->items) {
    const Value value = by_path ? path_of(each, *bound[0], nullptr, budget) : each;
    if (!found.is_number() || !value.is_number()) unsupported("'sum' of other than numbers");
    found = combined("+", found, value, budget);
  }
  return found;
}

template <bool kLeast>
Value extreme(const Value& of, const Arguments& given, Budget& budget) {
  const auto bound = given.bound("min", {"case_sensitive", "attribute"});
  if (bound[1] != nullptr) unsupported("'min' and 'max' of an attribute");
  const std::shared_ptr<Sequence> all = iterated(of, budget);
  Value found;
  for (size_t place = 0; place < all->items.size(); ++place) {
    const bool tells_cases = truth_or(bound[0], false);
    const Value key = folded(all->items[place], tells_cases, budget), best = folded(found, tells_cases, budget);
    if (place == 0 || (kLeast ? less(key, best, budget) : less(best, key, budget))) found = all->items[place];
  }
  return found;
}

const std::map<std::string, Filter>& filters() {
  static const std::map<std::string, Filter> all = {
      {"map", map},
      {"select", [](const Value& of, const Arguments& given, Budget& budget) { return selected(of, given, false, true, budget); }},
      {"reject", [](const Value& of, const Arguments& given, Budget& budget) { return selected(of, given, false, false, budget); }},
      {"selectattr", [](const Value& of, const Arguments& given, Budget& budget) { return selected(of, given, true, true, budget); }},
      {"rejectattr", [](const Value& of, const Arguments& given, Budget& budget) { return selected(of, given, true, false, budget); }},
      {"sort", sorted},
      {"dictsort", dict_sorted},
      {"unique", unique},
      {"join", joined},
      {"reverse", reversed},
      {"first", first},
      {"last", last},
      {"list", listed},
      {"items", items},
      {"sum", summed},
      {"min", extreme<true>},
      {"max", extreme<false>},
  };
  return all;
}

}  // namespace

Value filtered_list(const std::string& name, const Value& of, const Arguments& arguments, Budget& budget) {
  const auto found = filters().find(name);
  if (found == filters().end()) unsupported("the filter " + quote_short(name));
  return found->second(of, arguments, budget);
}

}  // namespace edgekit::jinja
