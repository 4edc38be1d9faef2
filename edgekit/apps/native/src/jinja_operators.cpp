#include <cmath>

#include "jinja_functions.h"
#include "jinja_text.h"

namespace edgekit::jinja {
namespace {

constexpr int64_t kExactInDouble = int64_t{1} << 53;

[[noreturn]] void refuse_operands(const std::string& operation, const Value& one, const Value& other) {
  refuse("'" + operation + "' has no meaning between '" + one.kind() + "' and '" + other.kind() + "'");
}

[[noreturn]] void too_large() { unsupported("a number beyond 64 bits"); }

int64_t power(int64_t base, int64_t exponent) {
  int64_t found = 1;
  for (; exponent > 0; --exponent) {
    if (base == 0 || base == 1) return base;
    if (__builtin_mul_overflow(found, base, &found)) too_large();
  }
  return found;
}

Value of_wholes(const std::string& operation, int64_t one, int64_t other) {
  int64_t found = 0;
  if (operation == "+" ? __builtin_add_overflow(one, other, &found)
      : operation == "-" ? __builtin_sub_overflow(one, other, &found)
      : operation == "*" ? __builtin_mul_overflow(one, other, &found) : false)
    too_large();
  if (operation == "+" || operation == "-" || operation == "*") return Value(found);
  if (operation == "**") {
    if (other < 0) unsupported("a power below 0");
    if (other > 64 && one != 0 && one != 1 && one != -1) too_large();
    return Value(power(one, one == -1 ? other % 2 : other));
  }
  if (other == 0) refuse("division by zero");
  if (operation == "/") {
    if (std::max(std::abs(one), std::abs(other)) > kExactInDouble) too_large();
    return Value(static_cast<double>(one) / static_cast<double>(other));
  }
  if (other == -1) return operation == "%" ? Value(int64_t{0}) : of_wholes("-", 0, one);
  const bool is_below = one % other != 0 && (one % other < 0) != (other < 0);  // Python rounds down
  if (operation == "//") return Value(one / other - (is_below ? 1 : 0));
  return Value(one % other + (is_below ? other : 0));
}

Value of_floats(const std::string& operation, double one, double other) {
  if (operation == "+") return Value(one + other);
  if (operation == "-") return Value(one - other);
  if (operation == "*") return Value(one * other);
  if (operation == "**") unsupported("a power of fractions");
  if (other == 0.0) refuse("division by zero");
  if (operation == "/") return Value(one / other);
  unsupported("'" + operation + "' of fractions");
}

Value repeated(const Value& of, int64_t count, Budget& budget) {
  const size_t times = count < 0 ? 0 : static_cast<size_t>(count);
  if (of.is_text()) {
    std::string made;
    budget.spend_bytes(times > 0 && of.text().size() > SIZE_MAX / times ? SIZE_MAX / 2 : of.text().size() * times);
    for (size_t time = 0; time < times; ++time) made += of.text();
    return Value(std::move(made));
  }
  Values items;
  for (size_t time = 0; time < times; ++time) {
    budget.spend(1 + 4 * of.sequence()->items.size());
    items.insert(items.end(), of.sequence()->items.begin(), of.sequence()->items.end());
  }
  return make_sequence(of.sequence()->kind, std::move(items), budget);
}

bool is_list_or_tuple(const Value& value) {
  return value.sequence() != nullptr && value.sequence()->kind <= Sequence::kTuple;
}

}  // namespace

Value combined(const std::string& operation, const Value& one, const Value& other, Budget& budget) {
  if (one.is_number() && other.is_number()) {
    return one.is_whole() && other.is_whole() ? of_wholes(operation, one.whole(), other.whole())
                                              : of_floats(operation, one.number(), other.number());
  }
  if (operation == "+" && one.is_text() && other.is_text()) {
    budget.spend_bytes(one.text().size() + other.text().size());
    return Value(one.text() + other.text());
  }
  if (operation == "+" && is_list_or_tuple(one) && is_list_or_tuple(other) &&
      one.sequence()->kind == other.sequence()->kind) {
    Values items = one.sequence()->items;
    items.insert(items.end(), other.sequence()->items.begin(), other.sequence()->items.end());
    return make_sequence(one.sequence()->kind, std::move(items), budget);
  }
  if (operation == "*" && other.is_whole() && (one.is_text() || is_list_or_tuple(one)))
    return repeated(one, other.whole(), budget);
  if (operation == "*" && one.is_whole() && (other.is_text() || is_list_or_tuple(other)))
    return repeated(other, one.whole(), budget);
  if (operation == "%" && one.is_text()) unsupported("'%' of a text");
  refuse_operands(operation, one, other);
}

bool compared(const std::string& operation, const Value& one, const Value& other, Budget& budget) {
  if (operation == "==") return equal(one, other, budget);
  if (operation == "!=") return !equal(one, other, budget);
  if (operation == "in") return contains(other, one, budget);
  if (operation == "not in") return !contains(other, one, budget);
  if (operation == "<") return less(one, other, budget);
  if (operation == ">") return less(other, one, budget);
  return operation == "<=" ? !less(other, one, budget) : !less(one, other, budget);
}

Value negated(const Value& number) {
  if (number.is<double>()) return Value(-number.number());
  if (!number.is_whole()) refuse(std::string("'-' has no meaning before '") + number.kind() + "'");
  return of_wholes("-", 0, number.whole());
}

}  // namespace edgekit::jinja
