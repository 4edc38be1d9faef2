#include "jinja_value.h"

#include <algorithm>
#include <cmath>

#include "utf8.h"

namespace edgekit::jinja {
namespace {

constexpr int kDeepest = 64;
constexpr size_t kValueUnits = 4;  // of the budget, for an element of a list

[[noreturn]] void refuse_order(const Value& one, const Value& other) {
  refuse(std::string("'<' has no meaning between '") + one.kind() + "' and '" + other.kind() + "'");
}

Values points_of(const std::string& text, Budget& budget) {
  Values found;
  for (size_t place = 0; place < text.size();) {
    const size_t begin = place;
    next_point(text, place);
    budget.spend(kValueUnits);
    found.emplace_back(text.substr(begin, place - begin));
  }
  return found;
}

}  // namespace

int Value::depth() const {
  if (const Sequence* list = sequence()) return list->depth;
  if (const Dict* found = dict()) return found->depth;
  if (is<std::shared_ptr<const Loop>>()) return 1 + as<std::shared_ptr<const Loop>>()->items->depth;
  if (is<std::shared_ptr<const Method>>()) return 1 + as<std::shared_ptr<const Method>>()->of.depth();
  return 0;
}

const char* Value::kind() const {
  if (const Sequence* list = sequence()) {
    constexpr const char* kNames[] = {"list", "tuple", "range", "view", "generator"};
    return kNames[list->kind];
  }
  constexpr const char* kNames[] = {"undefined", "NoneType",  "bool",  "int",         "float",  "str",     "list",
                                    "dict",      "Namespace", "macro", "LoopContext", "method", "function"};
  return kNames[kinds_.index()];
}

bool Value::truth() const {
  if (is_undefined() || is_none()) return false;
  if (is_number()) return number() != 0.0;
  if (is_text()) return !text().empty();
  if (const Sequence* list = sequence()) return list->kind == Sequence::kIterator || !list->items.empty();
  if (const Dict* found = dict()) return !found->entries.empty();
  if (is<std::shared_ptr<const Loop>>()) return !as<std::shared_ptr<const Loop>>()->items->items.empty();
  return true;
}

Value make_sequence(Sequence::Kind kind, Values items, Budget& budget) {
  budget.spend(1 + kValueUnits * items.size());
  int depth = 0;
  for (const Value& each : items) depth = std::max(depth, each.depth());
  if (depth >= kDeepest) refuse("it makes lists within lists, too deep");
  return Value(std::make_shared<Sequence>(Sequence{kind, std::move(items), depth + 1}));
}

Value make_dict(std::vector<std::pair<std::string, Value>> entries, Budget& budget) {
  budget.spend(1 + 2 * kValueUnits * entries.size());
  int depth = 0;
  for (const auto& each : entries) depth = std::max(depth, each.second.depth());
  if (depth >= kDeepest) refuse("it makes objects within objects, too deep");
  return Value(std::make_shared<const Dict>(Dict{std::move(entries), depth + 1}));
}

const Value* find(const std::vector<std::pair<std::string, Value>>& entries, std::string_view name, Budget& budget) {
  budget.spend(1 + entries.size() / 4 + name.size() / 64);
  for (const auto& each : entries) {
    if (each.first == name) return &each.second;
  }
  return nullptr;
}

void set(std::vector<std::pair<std::string, Value>>& entries, const std::string& name, Value value, Budget& budget) {
  if (const Value* found = find(entries, name, budget)) *const_cast<Value*>(found) = std::move(value);
  else entries.emplace_back(name, std::move(value));
}

Value from_json(const Json& json, Budget& budget) {
  if (json.is_null()) return Value::none();
  if (json.is_text()) return Value(json.text("text"));
  if (json.is_whole()) return Value(json.whole("number"));
  if (json.is_truth()) return Value(json.truth("truth"));
  if (json.is_list()) {
    Values items;
    for (const Json& each : json.list("list")) items.push_back(from_json(each, budget));
    return make_sequence(Sequence::kList, std::move(items), budget);
  }
  if (!json.is_object()) return Value(json.number("number"));
  std::vector<std::pair<std::string, Value>> entries;
  for (const auto& [name, value] : json.members("object")) entries.emplace_back(name, from_json(value, budget));
  return make_dict(std::move(entries), budget);
}

bool equal(const Value& one, const Value& other, Budget& budget) {
  budget.spend(1);
  if (one.is_number() && other.is_number()) {
    return one.is_whole() && other.is_whole() ? one.whole() == other.whole() : one.number() == other.number();
  }
  if (one.is_text() && other.is_text()) {
    budget.spend_bytes(std::min(one.text().size(), other.text().size()));
    return one.text() == other.text();
  }
  if (one.is_undefined() || one.is_none()) return one.is_undefined() ? other.is_undefined() : other.is_none();
  const Sequence *list = one.sequence(), *other_list = other.sequence();
  if (list != nullptr && other_list != nullptr) {
    if (list->kind >= Sequence::kView || other_list->kind >= Sequence::kView) unsupported("'==' of views");
    return list->kind == other_list->kind && list->items.size() == other_list->items.size() &&
           std::equal(list->items.begin(), list->items.end(), other_list->items.begin(),
                      [&](const Value& left, const Value& right) { return equal(left, right, budget); });
  }
  const Dict *dict = one.dict(), *other_dict = other.dict();
  if (dict != nullptr && other_dict != nullptr) {
    if (dict->entries.size() != other_dict->entries.size()) return false;
    return std::all_of(dict->entries.begin(), dict->entries.end(), [&](const auto& each) {
      const Value* found = find(other_dict->entries, each.first, budget);
      return found != nullptr && equal(each.second, *found, budget);
    });
  }
  const auto is_plain = [](const Value& each) {
    return each.is_undefined() || each.is_none() || each.is_number() || each.is_text() || each.sequence() || each.dict();
  };
  if (!is_plain(one) && !is_plain(other)) unsupported("'==' of functions");
  return false;
}

bool less(const Value& one, const Value& other, Budget& budget) {
  budget.spend(1);
  if (one.is_number() && other.is_number()) {
    return one.is_whole() && other.is_whole() ? one.whole() < other.whole() : one.number() < other.number();
  }
  if (one.is_text() && other.is_text()) {
    budget.spend_bytes(std::min(one.text().size(), other.text().size()));
    return one.text() < other.text();  // the order of UTF-8 is that of code points
  }
  const Sequence *list = one.sequence(), *other_list = other.sequence();
  if (list == nullptr || other_list == nullptr || list->kind != other_list->kind || list->kind > Sequence::kTuple)
    refuse_order(one, other);
  for (size_t place = 0; place < list->items.size() && place < other_list->items.size(); ++place) {
    if (!equal(list->items[place], other_list->items[place], budget))
      return less(list->items[place], other_list->items[place], budget);
  }
  return list->items.size() < other_list->items.size();
}

bool contains(const Value& whole, const Value& part, Budget& budget) {
  if (whole.is_text()) {
    if (!part.is_text()) refuse(std::string("'in' of a text takes a text, not '") + part.kind() + "'");
    budget.spend_search(whole.text().size(), part.text().size());
    return whole.text().find(part.text()) != std::string::npos;
  }
  if (const Dict* dict = whole.dict()) {
    if (part.sequence() != nullptr || part.dict() != nullptr) refuse("a list or an object is no key");
    return part.is_text() && find(dict->entries, part.text(), budget) != nullptr;
  }
  if (whole.is<Namespace*>()) refuse("'in' of a namespace");
  const std::shared_ptr<Sequence> items = iterated(whole, budget);
  return std::any_of(items->items.begin(), items->items.end(),
                     [&](const Value& each) { return equal(each, part, budget); });
}

std::shared_ptr<Sequence> iterated(const Value& value, Budget& budget) {
  if (const Sequence* list = value.sequence()) {
    if (list->kind != Sequence::kIterator) return value.as<std::shared_ptr<Sequence>>();
    Sequence& used = *value.as<std::shared_ptr<Sequence>>();
    auto taken = std::make_shared<Sequence>(Sequence{Sequence::kList, std::move(used.items), used.depth});
    used.items.clear();
    return taken;
  }
  Values items;
  if (value.is_text()) {
    items = points_of(value.text(), budget);
  } else if (const Dict* dict = value.dict()) {
    for (const auto& each : dict->entries) items.emplace_back(each.first);
  } else if (value.is<std::shared_ptr<const Loop>>()) {
    unsupported("a loop over 'loop'");
  } else if (!value.is_undefined()) {
    refuse(std::string("'") + value.kind() + "' cannot be iterated");
  }
  return make_sequence(Sequence::kList, std::move(items), budget).as<std::shared_ptr<Sequence>>();
}

}  // namespace edgekit::jinja
