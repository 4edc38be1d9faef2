#include "jinja_interpreter.h"

#include <deque>

#include "jinja_functions.h"
#include "jinja_text.h"

namespace edgekit::jinja {

struct Scope {
  std::shared_ptr<Scope> outer;
  std::vector<std::pair<std::string, Value>> names;
};
using ScopePtr = std::shared_ptr<Scope>;

struct Macro {
  const Statement& statement;
  ScopePtr scope;  // where it was defined: its body sees these names
};

namespace {

constexpr int kDeepest = 300;

class Interpreter {
 public:
  Interpreter(size_t most_bytes, Budget& budget) : most_bytes_(most_bytes), budget_(budget) {}
  ~Interpreter() {
    for (Namespace& each : namespaces_) each.entries.clear();
    for (Macro& each : macros_) each.scope.reset();  // which may hold the macro
  }

  std::string rendered(const Body& body, const ScopePtr& scope) {
    std::string made;
    run(body, scope, made);
    return made;
  }

 private:
  enum class Flow { kGoOn, kBreak, kContinue };

  class Deeper {
   public:
    explicit Deeper(int& depth) : depth_(depth) {
      if (++depth_ > kDeepest) refuse("it calls itself too deeply");
    }
    ~Deeper() { --depth_; }

   private:
    int& depth_;
  };

  ScopePtr inside(const ScopePtr& outer) {
    budget_.spend(2);
    return std::make_shared<Scope>(Scope{outer, {}});
  }

  Flow run(const Body& body, const ScopePtr& scope, std::string& out) {
    const Deeper deeper(depth_);
    for (const auto& each : body) {
      const Flow flow = run(*each, scope, out);
      if (flow != Flow::kGoOn) return flow;
    }
    return Flow::kGoOn;
  }

  void write(std::string& out, const std::string& text) {
    if (text.size() > most_bytes_ || out.size() > most_bytes_ - text.size())
      refuse("it wrote more than " + std::to_string(most_bytes_) + " bytes");
    budget_.spend_bytes(text.size());
    out += text;
  }

  Flow run(const Statement& statement, const ScopePtr& scope, std::string& out) {
    budget_.spend(1);
    switch (statement.kind) {
      case Statement::kText: write(out, statement.text); return Flow::kGoOn;
      case Statement::kOutput: write(out, str(printed(*statement.expressions[0], scope), budget_)); return Flow::kGoOn;
      case Statement::kIf: return run_if(statement, scope, out);
      case Statement::kFor: return run_for(statement, scope, out);
      case Statement::kSet: assign(statement.target, evaluate(*statement.expressions[0], scope), scope); return Flow::kGoOn;
      case Statement::kSetBlock: {
        std::string text;
        run(statement.bodies[0], inside(scope), text);
        assign(statement.target, Value(std::move(text)), scope);
        return Flow::kGoOn;
      }
      case Statement::kMacro:
        macros_.push_back({statement, scope});
        define(scope, statement.text, Value(static_cast<const Macro*>(&macros_.back())));
        return Flow::kGoOn;
      case Statement::kGeneration: run(statement.bodies[0], inside(scope), out); return Flow::kGoOn;
      case Statement::kBreak: return Flow::kBreak;
      case Statement::kContinue: return Flow::kContinue;
    }
    return Flow::kGoOn;
  }

  // A filter `safe` changes nothing where its value is written out at once.
  Value printed(const Expression& expression, const ScopePtr& scope) {
    const bool is_safe = expression.kind == Expression::kFilter && expression.name == "safe" &&
                         expression.parts.size() == 1 && expression.named.empty();
    return evaluate(is_safe ? *expression.parts[0] : expression, scope);
  }

  Flow run_if(const Statement& statement, const ScopePtr& scope, std::string& out) {
    size_t chosen = 0;
    while (chosen < statement.expressions.size() && !evaluate(*statement.expressions[chosen], scope).truth()) ++chosen;
    return chosen < statement.bodies.size() ? run(statement.bodies[chosen], scope, out) : Flow::kGoOn;
  }

  Flow run_for(const Statement& statement, const ScopePtr& scope, std::string& out) {
    const Value through = evaluate(*statement.expressions[0], scope);
    std::shared_ptr<Sequence> items = iterated(through, budget_);
    if (statement.expressions.size() > 1) {
      Values kept;
      for (const Value& each : items->items) {
        const ScopePtr inner = inside(scope);
        assign(statement.target, each, inner);
        if (evaluate(*statement.expressions[1], inner).truth()) kept.push_back(each);
      }
      items = make_sequence(Sequence::kList, std::move(kept), budget_).as<std::shared_ptr<Sequence>>();
    }
    const size_t count = items->items.size();
    for (size_t place = 0; place < count; ++place) {
      const ScopePtr inner = inside(scope);
      define(inner, "loop", Value(std::make_shared<const Loop>(Loop{items, place, 0})));
      assign(statement.target, items->items[place], inner);
      if (run(statement.bodies[0], inner, out) == Flow::kBreak) break;
    }
    if (count == 0 && statement.bodies.size() > 1) return run(statement.bodies[1], inside(scope), out);
    return Flow::kGoOn;
  }

  void define(const ScopePtr& scope, const std::string& name, Value value) {
    set(scope->names, name, std::move(value), budget_);
  }

  const Value* look_up(const std::string& name, const ScopePtr& from) {
    for (const Scope* scope = from.get(); scope != nullptr; scope = scope->outer.get()) {
      if (const Value* found = find(scope->names, name, budget_)) return found;
    }
    return nullptr;
  }

  void assign(const Target& target, Value value, const ScopePtr& scope) {
    if (!target.attribute.empty()) {
      const Value* found = look_up(target.names[0], scope);
      if (found == nullptr || !found->is<Namespace*>()) refuse(quote_short(target.names[0]) + " is no namespace");
      check_attribute(target.attribute);
      return set(found->as<Namespace*>()->entries, target.attribute, std::move(value), budget_);
    }
    if (!target.is_tuple) return define(scope, target.names[0], std::move(value));
    const std::shared_ptr<Sequence> parts = iterated(value, budget_);
    if (parts->items.size() != target.names.size())
      refuse(std::to_string(parts->items.size()) + " values for " + std::to_string(target.names.size()) + " names");
    for (size_t place = 0; place < target.names.size(); ++place) define(scope, target.names[place], parts->items[place]);
  }

  static void check_attribute(const std::string& name) {
    if (!name.empty() && name[0] == '_') refuse("a template may not store the attribute " + quote_short(name));
  }

  Value evaluate(const Expression& expression, const ScopePtr& scope) {
    const Deeper deeper(depth_);
    budget_.spend(1);
    const auto part = [&](size_t index) { return evaluate(*expression.parts[index], scope); };
    switch (expression.kind) {
      case Expression::kConstant: return expression.constant;
      case Expression::kName: return variable(expression.name, scope);
      case Expression::kAttribute: return attribute_of(part(0), expression.name, budget_);
      case Expression::kItem: return item(expression, scope);
      case Expression::kSlice: break;  // is read by its item
      case Expression::kCall: return call(expression, scope);
      case Expression::kFilter: return filter(expression, scope);
      case Expression::kTest: return test(expression, scope);
      case Expression::kNot: return Value(!part(0).truth());
      case Expression::kAnd:
      case Expression::kOr: return either(expression, scope);
      case Expression::kConditional:
        if (part(0).truth()) return part(1);
        return expression.parts[2] ? part(2) : Value();
      case Expression::kNegative: return negated(part(0));
      case Expression::kPositive: return negated(negated(part(0)));
      case Expression::kBinary: return binary(expression, scope);
      case Expression::kCompare: return comparison(expression, scope);
      case Expression::kConcat: return concatenation(expression, scope);
      case Expression::kList:
      case Expression::kTuple: return sequence(expression, scope);
      case Expression::kDict: return dict(expression, scope);
    }
    return Value();
  }

  Value variable(const std::string& name, const ScopePtr& scope) {
    if (const Value* found = look_up(name, scope)) return *found;
    return is_global(name) ? Value(Global{name}) : Value();
  }

  Value item(const Expression& expression, const ScopePtr& scope) {
    const Value of = evaluate(*expression.parts[0], scope);
    const Expression& place = *expression.parts[1];
    if (place.kind != Expression::kSlice) return item_of(of, evaluate(place, scope), budget_);
    if (of.is_undefined()) refuse("something undefined has no slices");
    Value ends[3];
    for (size_t index = 0; index < 3; ++index)
      ends[index] = place.parts[index] ? evaluate(*place.parts[index], scope) : Value::none();
    return slice_of(of, ends[0], ends[1], ends[2], budget_);
  }

  Arguments arguments(const Expression& expression, const ScopePtr& scope) {
    Arguments given;
    for (size_t index = 1; index < expression.parts.size(); ++index)
      given.places.push_back(evaluate(*expression.parts[index], scope));
    for (const auto& [name, value] : expression.named) given.named.emplace_back(name, evaluate(*value, scope));
    return given;
  }

  Value filter(const Expression& expression, const ScopePtr& scope) {
    const Value of = evaluate(*expression.parts[0], scope);
    return filtered(expression.name, of, arguments(expression, scope), budget_);
  }

  Value test(const Expression& expression, const ScopePtr& scope) {
    const Value of = evaluate(*expression.parts[0], scope);
    return Value(tested(expression.name, of, arguments(expression, scope), budget_));
  }

  Value either(const Expression& expression, const ScopePtr& scope) {
    Value left = evaluate(*expression.parts[0], scope);
    return left.truth() == (expression.kind == Expression::kOr) ? left : evaluate(*expression.parts[1], scope);
  }

  Value binary(const Expression& expression, const ScopePtr& scope) {
    const Value left = evaluate(*expression.parts[0], scope);
    return combined(expression.name, left, evaluate(*expression.parts[1], scope), budget_);
  }

  Value comparison(const Expression& expression, const ScopePtr& scope) {
    Value left = evaluate(*expression.parts[0], scope);
    for (size_t index = 0; index < expression.operators.size(); ++index) {
      Value right = evaluate(*expression.parts[index + 1], scope);
      if (!compared(expression.operators[index], left, right, budget_)) return Value(false);
      left = std::move(right);
    }
    return Value(true);
  }

  Value concatenation(const Expression& expression, const ScopePtr& scope) {
    std::string made;
    for (const auto& each : expression.parts) made += str(evaluate(*each, scope), budget_);
    return Value(std::move(made));
  }

  Value sequence(const Expression& expression, const ScopePtr& scope) {
    Values items;
    for (const auto& each : expression.parts) items.push_back(evaluate(*each, scope));
    const bool is_list = expression.kind == Expression::kList;
    return make_sequence(is_list ? Sequence::kList : Sequence::kTuple, std::move(items), budget_);
  }

  Value dict(const Expression& expression, const ScopePtr& scope) {
    std::vector<std::pair<std::string, Value>> entries;
    for (size_t index = 0; index < expression.parts.size(); index += 2) {
      const Value key = evaluate(*expression.parts[index], scope);
      if (!key.is_text()) unsupported("a key that is no text");
      set(entries, key.text(), evaluate(*expression.parts[index + 1], scope), budget_);
    }
    return make_dict(std::move(entries), budget_);
  }

  Value call(const Expression& expression, const ScopePtr& scope) {
    const Value callee = evaluate(*expression.parts[0], scope);
    const Arguments given = arguments(expression, scope);
    if (callee.is<std::shared_ptr<const Method>>())
      return called_method(*callee.as<std::shared_ptr<const Method>>(), given, budget_);
    if (callee.is<const Macro*>()) return called_macro(*callee.as<const Macro*>(), given);
    if (!callee.is<Global>()) refuse(std::string("'") + callee.kind() + "' cannot be called");
    const std::string& name = callee.as<Global>().name;
    if (name != "namespace") return called_global(name, given, budget_);
    const Value made = called_global("dict", given, budget_);
    namespaces_.emplace_back();
    for (const auto& [key, value] : made.dict()->entries) {
      check_attribute(key);
      namespaces_.back().entries.emplace_back(key, value);
    }
    return Value(&namespaces_.back());
  }

  Value called_macro(const Macro& macro, const Arguments& given) {
    const Statement& statement = macro.statement;
    const size_t count = statement.parameters.size(), plain = count - statement.defaults.size();
    if (given.places.size() > count) refuse("too many arguments of the macro " + quote_short(statement.text));
    const ScopePtr scope = inside(macro.scope);
    std::vector<bool> is_given(count, false);
    const auto bind = [&](size_t place, const Value& value) {
      define(scope, statement.parameters[place], value);
      is_given[place] = true;
    };
    for (size_t place = 0; place < given.places.size(); ++place) bind(place, given.places[place]);
    for (const auto& [name, value] : given.named) {
      size_t place = 0;
      while (place < count && statement.parameters[place] != name) ++place;
      if (place == count || is_given[place]) refuse("the macro " + quote_short(statement.text) + " takes no " + quote_short(name));
      bind(place, value);
    }
    for (size_t place = 0; place < count; ++place) {
      if (is_given[place]) continue;
      const bool has_default = place >= plain;
      define(scope, statement.parameters[place],
             has_default ? evaluate(*statement.defaults[place - plain], scope) : Value());
    }
    std::string text;
    run(statement.bodies[0], scope, text);
    return Value(std::move(text));
  }

  const size_t most_bytes_;
  Budget& budget_;
  int depth_ = 0;
  std::deque<Namespace> namespaces_;  // live as long as the rendering: values may name them anywhere
  std::deque<Macro> macros_;
};

}  // namespace

std::string render(const Body& body, std::vector<std::pair<std::string, Value>> variables, size_t most_bytes,
                   Budget& budget) {
  const auto scope = std::make_shared<Scope>(Scope{nullptr, std::move(variables)});
  return Interpreter(most_bytes, budget).rendered(body, scope);
}

}  // namespace edgekit::jinja
