// What expressions do with values: operators, attributes, filters, tests, methods and functions.
#pragma once

#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "jinja_value.h"

namespace edgekit::jinja {

struct Arguments {
  Values places;
  std::vector<std::pair<std::string, Value>> named;

  // The value of each parameter; null: not given. Refuses all others.
  std::vector<const Value*> bound(const std::string& function, std::initializer_list<const char*> names) const;
};

// Of a parameter that may be left out; refuse other kinds.
std::string text_or(const Value* given, const char* otherwise);
int64_t whole_or(const Value* given, int64_t otherwise);
bool truth_or(const Value* given, bool otherwise);

Value combined(const std::string& operation, const Value& one, const Value& other, Budget& budget);
bool compared(const std::string& operation, const Value& one, const Value& other, Budget& budget);
Value negated(const Value& number);

Value attribute_of(const Value& of, const std::string& name, Budget& budget);  // of.name
Value item_of(const Value& of, const Value& place, Budget& budget);            // of[place]
// of[first:end:step], of which each may be none.
Value slice_of(const Value& of, const Value& first, const Value& end, const Value& step, Budget& budget);

Value filtered(const std::string& name, const Value& of, const Arguments& arguments, Budget& budget);
Value filtered_list(const std::string& name, const Value& of, const Arguments& arguments, Budget& budget);
bool tested(const std::string& name, const Value& of, const Arguments& arguments, Budget& budget);
Value called_method(const Method& method, const Arguments& arguments, Budget& budget);

bool is_global(const std::string& name);
Value called_global(const std::string& name, const Arguments& arguments, Budget& budget);

}  // namespace edgekit::jinja
