#include "jinja_parser.h"

#include <algorithm>

namespace edgekit::jinja {
namespace {

class Parser : private ExpressionParser {
 public:
  using ExpressionParser::ExpressionParser;

  Body all() {
    Body found;
    body(found, {});
    return found;
  }

 private:
  using Names = std::vector<std::string_view>;
  using Made = std::unique_ptr<Statement>;

  Made made(Statement::Kind kind) const {
    auto found = std::make_unique<Statement>();
    found->kind = kind, found->line = here().line;
    return found;
  }

  void expect_block_end() {
    if (here().kind != Token::kBlockEnd) fail("expected the end of the tag");
    next();
  }

  // Statements up to a tag of one of these names, which is returned; its name is read.
  std::string body(Body& found, const Names& ends) {
    const Nested nested(*this);
    for (;;) {
      if (here().kind == Token::kEnd) {
        if (!ends.empty()) refuse("it ends without " + quote_short(ends.back()));
        return "";
      }
      if (here().kind == Token::kData) {
        Made text = made(Statement::kText);
        text->text = next().text;
        found.push_back(std::move(text));
      } else if (here().kind == Token::kVariableBegin) {
        next();
        Made output = made(Statement::kOutput);
        output->expressions.push_back(values(true));
        if (here().kind != Token::kVariableEnd) fail("expected the end of the output");
        next();
        found.push_back(std::move(output));
      } else {
        next();  // the begin of a block
        if (here().kind != Token::kName) fail("expected the name of a tag");
        if (std::find(ends.begin(), ends.end(), here().text) != ends.end()) return next().text;
        found.push_back(statement());
        expect_block_end();
      }
    }
  }

  // A body behind the end of the tag that is being read, and the name of the tag after it.
  std::string tagged_body(Statement& of, const Names& ends) {
    skip_operator(":");
    expect_block_end();
    of.bodies.emplace_back();
    return body(of.bodies.back(), ends);
  }

  Made statement() {
    const std::string name = next().text;
    if (name == "if") return if_statement();
    if (name == "for") return for_statement();
    if (name == "set") return set_statement();
    if (name == "macro") return macro();
    if (name == "generation") {
      Made found = made(Statement::kGeneration);
      const int loops = std::exchange(loops_, 0);
      tagged_body(*found, {"endgeneration"});
      loops_ = loops;
      return found;
    }
    if (name == "break" || name == "continue") {
      if (loops_ == 0) fail("'break' or 'continue' outside of a loop");
      return made(name == "break" ? Statement::kBreak : Statement::kContinue);
    }
    unsupported("the tag " + quote_short(name));
  }

  Made if_statement() {
    Made found = made(Statement::kIf);
    for (;;) {
      found->expressions.push_back(values(false));
      const std::string end = tagged_body(*found, {"elif", "else", "endif"});
      if (end == "else") tagged_body(*found, {"endif"});
      if (end != "elif") return found;
    }
  }

  Made for_statement() {
    Made found = made(Statement::kFor);
    found->target = names("in");
    if (!skip_name("in")) fail("expected 'in'");
    found->expressions.push_back(values(false, "recursive"));
    if (skip_name("if")) found->expressions.push_back(expression());
    if (here().is_name("recursive")) unsupported("a recursive loop");
    ++loops_;
    const std::string end = tagged_body(*found, {"endfor", "else"});
    --loops_;
    if (end == "else") tagged_body(*found, {"endfor"});
    return found;
  }

  Made set_statement() {
    Made found = made(Statement::kSet);
    if (here().kind == Token::kName && ahead().is_operator(".")) {
      found->target.names.push_back(assigned_name());
      next();
      found->target.attribute = expect_name();
    } else {
      found->target = names("");
    }
    if (skip_operator("=")) {
      found->expressions.push_back(values(true));
      return found;
    }
    if (here().is_operator("|")) unsupported("a 'set' block with a filter");
    found->kind = Statement::kSetBlock;
    tagged_body(*found, {"endset"});
    return found;
  }

  std::string assigned_name() {
    constexpr std::string_view kConstants[] = {"true", "false", "none", "True", "False", "None"};
    std::string name = expect_name();
    if (std::find(std::begin(kConstants), std::end(kConstants), name) != std::end(kConstants)) fail("no name");
    if (name == "self" || name == "loop") unsupported("an assignment to " + quote_short(name));
    return name;
  }

  Target names(std::string_view end) {
    Target found;
    const bool has_brackets = skip_operator("(");
    do {
      if (!found.names.empty() && (here().is_name(end) || here().is_operator("=") || here().is_operator(")"))) break;
      found.names.push_back(assigned_name());
    } while (here().is_operator(",") ? (found.is_tuple = true, next(), true) : false);
    if (has_brackets) expect_operator(")");
    if (here().is_operator(".") || here().is_operator("(")) unsupported("an assignment to more than names");
    return found;
  }

  Made macro() {
    Made found = made(Statement::kMacro);
    found->text = assigned_name();
    expect_operator("(");
    while (!here().is_operator(")")) {
      found->parameters.push_back(assigned_name());
      if (skip_operator("=")) found->defaults.push_back(expression());
      else if (!found->defaults.empty()) fail("a parameter without a default after one with a default");
      if (!here().is_operator(")")) expect_operator(",");
    }
    next();
    const bool was_in_macro = std::exchange(in_macro_, true);
    const int loops = std::exchange(loops_, 0);
    tagged_body(*found, {"endmacro"});
    in_macro_ = was_in_macro, loops_ = loops;
    return found;
  }

  int loops_ = 0;  // around what is being read
};

}  // namespace

Body parse(const std::string& source) { return Parser(tokens_of(source)).all(); }

}  // namespace edgekit::jinja
