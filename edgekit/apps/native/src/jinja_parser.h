// The parser of expressions, on which that of statements stands.
#pragma once

#include "jinja_lexer.h"
#include "jinja_syntax.h"

namespace edgekit::jinja {

class ExpressionParser {
 public:
  explicit ExpressionParser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

 protected:
  class Nested {  // counts how deep the parser calls itself
   public:
    explicit Nested(ExpressionParser& parser);
    ~Nested() { --parser_.depth_; }

   private:
    ExpressionParser& parser_;
  };

  const Token& here() const { return tokens_[place_]; }
  const Token& ahead() const { return tokens_[std::min(place_ + 1, tokens_.size() - 1)]; }
  Token next();
  bool skip_name(std::string_view name);
  bool skip_operator(std::string_view text);
  void expect_operator(std::string_view text);
  std::string expect_name();
  [[noreturn]] void fail(const std::string& why) const;

  ExpressionPtr expression();  // of one value
  // One value or several with commas between; `is_conditional`: with `a if b else c`.
  ExpressionPtr values(bool is_conditional, std::string_view end_name = "", bool may_be_empty = false);

  bool in_macro_ = false;

 private:
  using Made = std::unique_ptr<Expression>;
  ExpressionPtr made(Made expression) const;
  ExpressionPtr made(Expression::Kind kind, ExpressionPtr one, ExpressionPtr other = nullptr, std::string name = "") const;
  bool ends_values(std::string_view end_name) const;

  ExpressionPtr disjunction();
  ExpressionPtr conjunction();
  ExpressionPtr negation();
  ExpressionPtr comparison();
  ExpressionPtr sum();
  ExpressionPtr concatenation();
  ExpressionPtr product();
  ExpressionPtr power();
  ExpressionPtr unary(bool with_filters);
  ExpressionPtr primary();
  ExpressionPtr list();
  ExpressionPtr dict();
  ExpressionPtr postfix(ExpressionPtr of);
  ExpressionPtr filters(ExpressionPtr of);
  ExpressionPtr subscript(ExpressionPtr of);
  ExpressionPtr bracketed();  // an index or a slice
  ExpressionPtr test(ExpressionPtr of);
  void arguments(Expression& call);

  const std::vector<Token> tokens_;
  size_t place_ = 0;
  int depth_ = 0;
};

}  // namespace edgekit::jinja
