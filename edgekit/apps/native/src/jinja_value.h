// Values of chat templates, which behave as those of Python do.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "errors.h"
#include "json.h"

namespace edgekit::jinja {

// What a rendering may still do. Templates are untrusted.
class Budget {
 public:
  explicit Budget(size_t units) : left_(units) {}
  void spend(size_t units) {
    if (units > left_) refuse("it works for too long");
    left_ -= units;
  }
  void spend_bytes(size_t bytes) { spend(1 + bytes / 16); }
  void spend_search(size_t text, size_t part) {  // at worst, each place of the text is compared with the whole part
    spend(1 + text / 16 + (part == 0 ? 0 : text / 64 * (part / 64)));
  }

 private:
  size_t left_;
};

[[noreturn]] inline void unsupported(const std::string& what) {
  refuse("it uses " + what + ", which this library does not have; render it in Python");
}

class Value;
struct Expression;
struct Loop;
struct Macro;
struct Method;
struct Namespace;

struct Sequence {
  enum Kind { kList, kTuple, kRange, kView, kIterator };  // a view has no places, an iterator is used up once
  Kind kind;
  std::vector<Value> items;
  int depth;  // of lists within lists
};

struct Dict {
  std::vector<std::pair<std::string, Value>> entries;  // in their order
  int depth;
};

struct Undefined {};
struct Global {
  std::string name;  // of a function that every template has
};

class Value {
 public:
  using Text = std::shared_ptr<const std::string>;
  using Kinds = std::variant<Undefined, std::nullptr_t, bool, int64_t, double, Text, std::shared_ptr<Sequence>,
                             std::shared_ptr<const Dict>, Namespace*, const Macro*, std::shared_ptr<const Loop>,
                             std::shared_ptr<const Method>, Global>;

  Value() = default;  // undefined
  template <typename Kind, typename = std::enable_if_t<std::is_constructible_v<Kinds, Kind>>>
  explicit Value(Kind kind) : kinds_(std::move(kind)) {}
  explicit Value(std::string text) : kinds_(std::make_shared<const std::string>(std::move(text))) {}
  static Value none() { return Value(nullptr); }

  template <typename Kind>
  bool is() const {
    return std::holds_alternative<Kind>(kinds_);
  }
  bool is_undefined() const { return is<Undefined>(); }
  bool is_none() const { return is<std::nullptr_t>(); }
  bool is_text() const { return is<Text>(); }
  bool is_whole() const { return is<int64_t>() || is<bool>(); }  // a truth is a whole number in Python
  bool is_number() const { return is_whole() || is<double>(); }

  template <typename Kind>
  const Kind& as() const {
    return std::get<Kind>(kinds_);
  }
  const std::string& text() const { return *as<Text>(); }
  int64_t whole() const { return is<bool>() ? int64_t{as<bool>()} : as<int64_t>(); }
  double number() const { return is<double>() ? as<double>() : static_cast<double>(whole()); }
  const Sequence* sequence() const { return is<std::shared_ptr<Sequence>>() ? as<std::shared_ptr<Sequence>>().get() : nullptr; }
  const Dict* dict() const { return is<std::shared_ptr<const Dict>>() ? as<std::shared_ptr<const Dict>>().get() : nullptr; }

  int depth() const;
  const char* kind() const;  // its type's name in Python
  bool truth() const;

 private:
  Kinds kinds_;
};

using Values = std::vector<Value>;

struct Namespace {
  std::vector<std::pair<std::string, Value>> entries;
};

struct Loop {
  std::shared_ptr<Sequence> items;
  size_t place, nesting;
};

struct Method {
  Value of;
  std::string name;
};

// Throw std::runtime_error where values are nested too deeply or are not hashable.
Value make_sequence(Sequence::Kind kind, Values items, Budget& budget);
Value make_dict(std::vector<std::pair<std::string, Value>> entries, Budget& budget);
void set(std::vector<std::pair<std::string, Value>>& entries, const std::string& name, Value value, Budget& budget);
const Value* find(const std::vector<std::pair<std::string, Value>>& entries, std::string_view name, Budget& budget);

Value from_json(const Json& json, Budget& budget);

bool equal(const Value& one, const Value& other, Budget& budget);
bool less(const Value& one, const Value& other, Budget& budget);  // refuses kinds that have no order
bool contains(const Value& whole, const Value& part, Budget& budget);

// What a loop over it sees; an iterator is empty afterwards.
std::shared_ptr<Sequence> iterated(const Value& value, Budget& budget);

}  // namespace edgekit::jinja
