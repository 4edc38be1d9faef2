// A JSON reader with limits, and a writer of single lines.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace edgekit {

class Json {
 public:
  using List = std::vector<Json>;
  using Members = std::vector<std::pair<std::string, Json>>;  // in their order

  Json() = default;
  Json(std::nullptr_t) {}
  Json(bool value) : value_(value) {}
  Json(int value) : value_(int64_t{value}) {}
  Json(int64_t value) : value_(value) {}
  Json(uint64_t value) : value_(static_cast<int64_t>(value)) {}
  Json(double value) : value_(value) {}
  Json(const char* value) : value_(std::string(value)) {}
  Json(std::string value) : value_(std::move(value)) {}
  Json(List value) : value_(std::move(value)) {}
  Json(Members value) : value_(std::move(value)) {}
  template <typename Kind>
  Json(const std::optional<Kind>& value) {
    if (value) *this = Json(*value);
  }

  // Throws std::runtime_error, also for a key that occurs twice and for what is not UTF-8.
  enum class LargeNumbers { kRefused, kRounded };  // whole ones beyond 64 bits
  static Json parse(const std::string& text, LargeNumbers large = LargeNumbers::kRefused);

  bool is_null() const { return std::holds_alternative<std::nullptr_t>(value_); }
  bool is_list() const { return std::holds_alternative<List>(value_); }
  bool is_text() const { return std::holds_alternative<std::string>(value_); }
  bool is_object() const { return std::holds_alternative<Members>(value_); }
  bool is_truth() const { return std::holds_alternative<bool>(value_); }
  bool is_whole() const { return std::holds_alternative<int64_t>(value_); }
  // Each throws std::runtime_error, naming `what`, where the value is of another kind.
  const std::string& text(const char* what) const;
  int64_t whole(const char* what) const;
  double number(const char* what) const;
  bool truth(const char* what) const;
  const List& list(const char* what) const;
  const Members& members(const char* what) const;
  const Json& at(const std::string& name) const;
  const Json* find(const std::string& name) const;  // null: absent, or null itself
  void set(const std::string& name, Json value);  // of an object: replaces, or appends

  std::string line() const;

 private:
  void write(std::string& out) const;

  std::variant<std::nullptr_t, bool, int64_t, double, std::string, List, Members> value_ = nullptr;
};

}  // namespace edgekit
