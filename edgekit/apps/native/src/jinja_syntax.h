// A parsed template: statements and expressions.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "jinja_value.h"

namespace edgekit::jinja {

struct Expression;
using ExpressionPtr = std::unique_ptr<const Expression>;

struct Expression {
  enum Kind {
    kConstant, kName, kAttribute, kItem, kSlice, kCall, kFilter, kTest, kNot, kAnd, kOr, kConditional, kNegative,
    kPositive, kBinary, kCompare, kConcat, kList, kTuple, kDict
  };
  Kind kind;
  std::string name;                  // of a variable, an attribute, a filter, a test; the operator of kBinary
  Value constant;
  std::vector<ExpressionPtr> parts;  // null: left out, in slices and conditionals
  std::vector<std::pair<std::string, ExpressionPtr>> named;  // arguments
  std::vector<std::string> operators;                        // of kCompare, between its parts
  int depth = 1;
};

struct Statement;
using Body = std::vector<std::unique_ptr<const Statement>>;

struct Target {  // of an assignment: one name, an attribute of a namespace, or several names
  std::vector<std::string> names;
  std::string attribute;
  bool is_tuple = false;
};

struct Statement {
  enum Kind { kText, kOutput, kIf, kFor, kSet, kSetBlock, kMacro, kGeneration, kBreak, kContinue };
  Kind kind;
  size_t line = 0;
  std::string text;                       // of kText; the name of a macro
  std::vector<ExpressionPtr> expressions;  // of kOutput and kSet: one; of kIf: each condition; of kFor: what it goes through, and its filter
  std::vector<Body> bodies;               // of kIf: one for each condition and one for `else`; of kFor: its own and `else`
  Target target;
  std::vector<std::string> parameters;       // of a macro
  std::vector<ExpressionPtr> defaults;  // of its last parameters
};

// Throws std::runtime_error; names what this library does not have.
Body parse(const std::string& source);

}  // namespace edgekit::jinja
