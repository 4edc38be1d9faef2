#include <algorithm>
#include <cerrno>
#include <cstdlib>

#include "jinja_parser.h"

namespace edgekit::jinja {
namespace {

constexpr int kDeepestCalls = 64, kDeepestTree = 200;

}  // namespace

ExpressionParser::Nested::Nested(ExpressionParser& parser) : parser_(parser) {
  if (++parser.depth_ > kDeepestCalls) refuse("it is nested too deeply");
}

void ExpressionParser::fail(const std::string& why) const {
  refuse("line " + std::to_string(here().line) + ": " + why + " at " + quote_short(here().text));
}

Token ExpressionParser::next() {
  const Token& found = here();
  if (found.kind != Token::kEnd) ++place_;
  return found;
}

bool ExpressionParser::skip_name(std::string_view name) {
  if (!here().is_name(name)) return false;
  ++place_;
  return true;
}

bool ExpressionParser::skip_operator(std::string_view text) {
  if (!here().is_operator(text)) return false;
  ++place_;
  return true;
}

void ExpressionParser::expect_operator(std::string_view text) {
  if (!skip_operator(text)) fail("expected " + quote_short(text));
}

std::string ExpressionParser::expect_name() {
  if (here().kind != Token::kName) fail("expected a name");
  return next().text;
}

ExpressionPtr ExpressionParser::made(Made expression) const {
  const auto deepen = [&](const ExpressionPtr& part) {
    if (part) expression->depth = std::max(expression->depth, part->depth + 1);
  };
  for (const ExpressionPtr& part : expression->parts) deepen(part);
  for (const auto& part : expression->named) deepen(part.second);
  if (expression->depth > kDeepestTree) refuse("it is nested too deeply");
  return expression;
}

ExpressionPtr ExpressionParser::made(Expression::Kind kind, ExpressionPtr one, ExpressionPtr other,
                                     std::string name) const {
  auto found = std::make_unique<Expression>();
  found->kind = kind, found->name = std::move(name);
  if (one) found->parts.push_back(std::move(one));
  if (other) found->parts.push_back(std::move(other));
  return made(std::move(found));
}

ExpressionPtr ExpressionParser::expression() {
  const Nested nested(*this);
  ExpressionPtr found = disjunction();
  while (skip_name("if")) {
    auto chosen = std::make_unique<Expression>();
    chosen->kind = Expression::kConditional;
    chosen->parts.push_back(disjunction());
    chosen->parts.push_back(std::move(found));
    chosen->parts.push_back(skip_name("else") ? expression() : nullptr);
    found = made(std::move(chosen));
  }
  return found;
}

bool ExpressionParser::ends_values(std::string_view end_name) const {
  const Token::Kind kind = here().kind;
  return kind == Token::kVariableEnd || kind == Token::kBlockEnd || here().is_operator(")") ||
         (!end_name.empty() && here().is_name(end_name));
}

ExpressionPtr ExpressionParser::values(bool is_conditional, std::string_view end_name, bool may_be_empty) {
  const Nested nested(*this);
  auto tuple = std::make_unique<Expression>();
  tuple->kind = Expression::kTuple;
  bool has_comma = false;
  while (!ends_values(end_name)) {
    tuple->parts.push_back(is_conditional ? expression() : disjunction());
    if (!skip_operator(",")) break;
    has_comma = true;
  }
  if (has_comma) return made(std::move(tuple));
  if (!tuple->parts.empty()) return std::move(tuple->parts.front());
  if (!may_be_empty) fail("expected an expression");
  return made(std::move(tuple));
}

ExpressionPtr ExpressionParser::disjunction() {
  ExpressionPtr left = conjunction();
  while (skip_name("or")) left = made(Expression::kOr, std::move(left), conjunction());
  return left;
}

ExpressionPtr ExpressionParser::conjunction() {
  ExpressionPtr left = negation();
  while (skip_name("and")) left = made(Expression::kAnd, std::move(left), negation());
  return left;
}

ExpressionPtr ExpressionParser::negation() {
  const Nested nested(*this);
  return skip_name("not") ? made(Expression::kNot, negation()) : comparison();
}

ExpressionPtr ExpressionParser::comparison() {
  constexpr std::string_view kOperators[] = {"==", "!=", "<", "<=", ">", ">="};
  auto compared = std::make_unique<Expression>();
  compared->kind = Expression::kCompare;
  compared->parts.push_back(sum());
  for (;;) {
    const bool is_ordered = std::any_of(std::begin(kOperators), std::end(kOperators),
                                        [&](std::string_view each) { return here().is_operator(each); });
    if (is_ordered || here().is_name("in")) {
      compared->operators.push_back(next().text);
    } else if (here().is_name("not") && ahead().is_name("in")) {
      next(), next();
      compared->operators.emplace_back("not in");
    } else {
      break;
    }
    compared->parts.push_back(sum());
  }
  if (compared->operators.empty()) return std::move(compared->parts.front());
  return made(std::move(compared));
}

ExpressionPtr ExpressionParser::sum() {
  ExpressionPtr left = concatenation();
  while (here().is_operator("+") || here().is_operator("-")) {
    const std::string name = next().text;
    left = made(Expression::kBinary, std::move(left), concatenation(), name);
  }
  return left;
}

ExpressionPtr ExpressionParser::concatenation() {
  auto all = std::make_unique<Expression>();
  all->kind = Expression::kConcat;
  do all->parts.push_back(product());
  while (skip_operator("~"));
  if (all->parts.size() == 1) return std::move(all->parts.front());
  return made(std::move(all));
}

ExpressionPtr ExpressionParser::product() {
  ExpressionPtr left = power();
  while (here().is_operator("*") || here().is_operator("/") || here().is_operator("//") || here().is_operator("%")) {
    const std::string name = next().text;
    left = made(Expression::kBinary, std::move(left), power(), name);
  }
  return left;
}

ExpressionPtr ExpressionParser::power() {
  ExpressionPtr left = unary(true);
  while (skip_operator("**")) left = made(Expression::kBinary, std::move(left), unary(true), "**");
  return left;
}

ExpressionPtr ExpressionParser::unary(bool with_filters) {
  const Nested nested(*this);
  ExpressionPtr found;
  if (skip_operator("-")) found = made(Expression::kNegative, unary(false));
  else if (skip_operator("+")) found = made(Expression::kPositive, unary(false));
  else found = primary();
  found = postfix(std::move(found));
  return with_filters ? filters(std::move(found)) : std::move(found);
}

ExpressionPtr ExpressionParser::primary() {
  if (here().is_operator("[")) return list();
  if (here().is_operator("{")) return dict();
  if (skip_operator("(")) {
    ExpressionPtr found = values(true, "", true);
    expect_operator(")");
    return found;
  }
  auto found = std::make_unique<Expression>();
  found->kind = Expression::kConstant;
  const Token token = next();
  const std::string& text = token.text;
  if (token.kind == Token::kName) {
    if (text == "true" || text == "True" || text == "false" || text == "False") {
      found->constant = Value(text[0] == 't' || text[0] == 'T');
    } else if (text == "none" || text == "None") {
      found->constant = Value::none();
    } else {
      if (text == "self" || text == "super" || (in_macro_ && (text == "varargs" || text == "kwargs" || text == "caller")))
        unsupported("the name " + quote_short(text));
      found->kind = Expression::kName, found->name = text;
    }
  } else if (token.kind == Token::kText) {
    std::string joined = text;
    while (here().kind == Token::kText) joined += next().text;
    found->constant = Value(std::move(joined));
  } else if (token.kind == Token::kWhole) {
    errno = 0;
    found->constant = Value(int64_t{std::strtoll(text.c_str(), nullptr, 10)});
    if (errno == ERANGE) unsupported("a number beyond 64 bits");
  } else if (token.kind == Token::kFloat) {
    found->constant = Value(std::strtod(text.c_str(), nullptr));
  } else {
    refuse("line " + std::to_string(token.line) + ": an unexpected " + quote_short(text));
  }
  return made(std::move(found));
}

ExpressionPtr ExpressionParser::list() {
  auto found = std::make_unique<Expression>();
  found->kind = Expression::kList;
  expect_operator("[");
  while (!here().is_operator("]")) {
    found->parts.push_back(expression());
    if (!here().is_operator("]")) expect_operator(",");
  }
  next();
  return made(std::move(found));
}

ExpressionPtr ExpressionParser::dict() {
  auto found = std::make_unique<Expression>();
  found->kind = Expression::kDict;
  expect_operator("{");
  while (!here().is_operator("}")) {
    found->parts.push_back(expression());
    expect_operator(":");
    found->parts.push_back(expression());
    if (!here().is_operator("}")) expect_operator(",");
  }
  next();
  return made(std::move(found));
}

ExpressionPtr ExpressionParser::postfix(ExpressionPtr of) {
  for (;;) {
    if (here().is_operator(".") || here().is_operator("[")) {
      of = subscript(std::move(of));
    } else if (here().is_operator("(")) {
      auto call = std::make_unique<Expression>();
      call->kind = Expression::kCall;
      call->parts.push_back(std::move(of));
      arguments(*call);
      of = made(std::move(call));
    } else {
      return of;
    }
  }
}

ExpressionPtr ExpressionParser::filters(ExpressionPtr of) {
  for (;;) {
    if (skip_operator("|")) {
      auto filter = std::make_unique<Expression>();
      filter->kind = Expression::kFilter;
      filter->name = expect_name();
      if (here().is_operator(".")) unsupported("a filter with a dot in its name");
      filter->parts.push_back(std::move(of));
      if (here().is_operator("(")) arguments(*filter);
      of = made(std::move(filter));
    } else if (skip_name("is")) {
      of = test(std::move(of));
    } else if (here().is_operator("(")) {
      of = postfix(std::move(of));
    } else {
      return of;
    }
  }
}

ExpressionPtr ExpressionParser::subscript(ExpressionPtr of) {
  if (skip_operator(".")) {
    if (here().kind == Token::kName) return made(Expression::kAttribute, std::move(of), nullptr, next().text);
    if (here().kind != Token::kWhole) fail("expected a name or a number");
    return made(Expression::kItem, std::move(of), primary());
  }
  expect_operator("[");
  ExpressionPtr place = bracketed();
  if (here().is_operator(",")) unsupported("several indices in one bracket");
  expect_operator("]");
  return made(Expression::kItem, std::move(of), std::move(place));
}

ExpressionPtr ExpressionParser::bracketed() {
  const auto ends = [&] { return here().is_operator("]") || here().is_operator(",") || here().is_operator(":"); };
  ExpressionPtr first = here().is_operator(":") ? nullptr : expression();
  if (!skip_operator(":")) return first;
  auto slice = std::make_unique<Expression>();
  slice->kind = Expression::kSlice;
  slice->parts.push_back(std::move(first));
  slice->parts.push_back(ends() ? nullptr : expression());
  slice->parts.push_back(skip_operator(":") && !ends() ? expression() : nullptr);
  return made(std::move(slice));
}

ExpressionPtr ExpressionParser::test(ExpressionPtr of) {
  const bool is_negated = skip_name("not");
  auto found = std::make_unique<Expression>();
  found->kind = Expression::kTest;
  found->name = expect_name();
  if (here().is_operator(".")) unsupported("a test with a dot in its name");
  found->parts.push_back(std::move(of));
  const Token& token = here();
  const bool has_value = token.kind == Token::kName || token.kind == Token::kText || token.kind == Token::kWhole ||
                         token.kind == Token::kFloat || token.is_operator("[") || token.is_operator("{");
  if (token.is_operator("(")) {
    arguments(*found);
  } else if (has_value && !token.is_name("else") && !token.is_name("or") && !token.is_name("and")) {
    if (token.is_name("is")) fail("tests in a chain");
    found->parts.push_back(postfix(primary()));
  }
  ExpressionPtr whole = made(std::move(found));
  return is_negated ? made(Expression::kNot, std::move(whole)) : std::move(whole);
}

void ExpressionParser::arguments(Expression& call) {
  expect_operator("(");
  while (!here().is_operator(")")) {
    if (here().is_operator("*") || here().is_operator("**")) unsupported("arguments with '*'");
    if (here().kind == Token::kName && ahead().is_operator("=")) {
      std::string name = next().text;
      next();
      for (const auto& each : call.named) {
        if (each.first == name) fail("an argument that is given twice");
      }
      call.named.emplace_back(std::move(name), expression());
    } else {
      if (!call.named.empty()) fail("an argument without a name after one with a name");
      call.parts.push_back(expression());
    }
    if (!here().is_operator(")")) expect_operator(",");
  }
  next();
}

}  // namespace edgekit::jinja
