#include <map>

#include "jinja_functions.h"
#include "jinja_text.h"

namespace edgekit::jinja {
namespace {

bool is_iterable(const Value& of) {
  return of.is_undefined() || of.is_text() || of.sequence() != nullptr || of.dict() != nullptr ||
         of.is<std::shared_ptr<const Loop>>();
}

bool is_callable(const Value& of) {
  return of.is<Global>() || of.is<std::shared_ptr<const Method>>() || of.is<const Macro*>();
}

// Tests without arguments.
const std::map<std::string, bool (*)(const Value&)>& plain_tests() {
  static const std::map<std::string, bool (*)(const Value&)> all = {
      {"defined", [](const Value& of) { return !of.is_undefined(); }},
      {"undefined", [](const Value& of) { return of.is_undefined(); }},
      {"none", [](const Value& of) { return of.is_none(); }},
      {"string", [](const Value& of) { return of.is_text(); }},
      {"mapping", [](const Value& of) { return of.dict() != nullptr; }},
      {"iterable", is_iterable},
      {"sequence", [](const Value& of) {
         return of.is_undefined() || of.is_text() || of.dict() != nullptr ||
                (of.sequence() != nullptr && of.sequence()->kind <= Sequence::kRange);
       }},
      {"number", [](const Value& of) { return of.is_number(); }},
      {"integer", [](const Value& of) { return of.is<int64_t>(); }},
      {"float", [](const Value& of) { return of.is<double>(); }},
      {"boolean", [](const Value& of) { return of.is<bool>(); }},
      {"true", [](const Value& of) { return of.is<bool>() && of.as<bool>(); }},
      {"false", [](const Value& of) { return of.is<bool>() && !of.as<bool>(); }},
  };
  return all;
}

// The comparison that a test's name stands for; empty: none.
std::string operation_of(const std::string& name) {
  static const std::map<std::string, std::string> all = {
      {"eq", "=="}, {"equalto", "=="}, {"==", "=="}, {"ne", "!="}, {"!=", "!="},          {"lt", "<"},
      {"<", "<"},   {"lessthan", "<"}, {"le", "<="}, {"<=", "<="}, {"gt", ">"},           {">", ">"},
      {"ge", ">="}, {">=", ">="},      {"in", "in"}, {"greaterthan", ">"}};
  const auto found = all.find(name);
  return found == all.end() ? "" : found->second;
}

int64_t remainder(const Value& of, int64_t by) {
  if (!of.is_whole()) unsupported("'odd', 'even' and 'divisibleby' of other than whole numbers");
  if (by == 0) refuse("division by zero");
  return by == -1 ? 0 : of.whole() % by;
}

}  // namespace

bool tested(const std::string& name, const Value& of, const Arguments& given, Budget& budget) {
  budget.spend(1);
  if (const auto found = plain_tests().find(name); found != plain_tests().end()) {
    given.bound(name, {});
    return found->second(of);
  }
  if (name == "callable") {
    if (!is_callable(of) && !is_iterable(of) && !of.is_number() && !of.is_none()) unsupported("'callable' of this");
    if (of.is_undefined()) unsupported("'callable' of something undefined");
    return is_callable(of);
  }
  if (name == "odd" || name == "even") {
    given.bound(name, {});
    return (remainder(of, 2) != 0) == (name == "odd");
  }
  const Value* other = given.bound(name, {""})[0];
  if (name == "lower" || name == "upper") unsupported("the test " + quote_short(name));
  const std::string operation = operation_of(name);
  if (name != "divisibleby" && name != "sameas" && operation.empty()) unsupported("the test " + quote_short(name));
  if (other == nullptr) refuse("the test " + quote_short(name) + " takes a value");
  if (name == "divisibleby") return remainder(of, whole_or(other, 1)) == 0;
  if (name == "sameas") {
    if (!other->is<bool>() && !other->is_none()) unsupported("'sameas' of other than true, false and none");
    return of.is_none() ? other->is_none() : of.is<bool>() && other->is<bool>() && of.as<bool>() == other->as<bool>();
  }
  return compared(operation, of, *other, budget);
}

}  // namespace edgekit::jinja
