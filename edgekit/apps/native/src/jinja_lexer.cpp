#include "jinja_lexer.h"

#include <cctype>

#include "jinja_text.h"
#include "utf8.h"

namespace edgekit::jinja {
namespace {

constexpr size_t kMostTokens = 1 << 20;

bool is_digit(char each) { return each >= '0' && each <= '9'; }
bool is_letter(char each) { return each == '_' || std::isalnum(static_cast<unsigned char>(each)) != 0; }

// Line ends become \n, and the last one is dropped.
std::string with_plain_lines(const std::string& source) {
  std::string made;
  for (size_t place = 0; place < source.size(); ++place) {
    const bool is_pair = source[place] == '\r' && place + 1 < source.size() && source[place + 1] == '\n';
    if (!is_pair) made += source[place] == '\r' ? '\n' : source[place];
  }
  if (!made.empty() && made.back() == '\n') made.pop_back();
  return made;
}

class Lexer {
 public:
  explicit Lexer(const std::string& source) : text_(with_plain_lines(source)) {}

  std::vector<Token> all() {
    while (place_ < text_.size()) root();
    add(Token::kEnd, "");
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void fail(const std::string& why) const { refuse("line " + std::to_string(line_) + ": " + why); }

  void add(Token::Kind kind, std::string text) {
    if (tokens_.size() >= kMostTokens) refuse("it is too long");
    tokens_.push_back({kind, std::move(text), line_});
  }

  bool at(std::string_view wanted) const { return text_.compare(place_, wanted.size(), wanted) == 0; }
  void move_to(size_t place) {
    for (; place_ < place; ++place_) line_ += text_[place_] == '\n';
  }

  void skip_space() {
    for (size_t after = place_; after < text_.size();) {
      if (!is_space(next_point(text_, after))) return;
      move_to(after);
    }
  }

  // A text up to the next tag, and the begin of that tag.
  void root() {
    size_t begin = text_.find('{', place_);
    while (begin != std::string::npos && (begin + 1 == text_.size() || !is_one_of(text_[begin + 1], "{%#")))
      begin = text_.find('{', begin + 1);
    if (begin == std::string::npos) {
      add(Token::kData, text_.substr(place_));
      return move_to(text_.size());
    }
    const char kind = text_[begin + 1];
    const char sign = sign_at(begin + 2);
    add_data(begin, sign, kind != '{');
    move_to(begin + 2 + (sign != 0));
    if (kind == '#') return comment();
    if (kind == '%' && is_raw()) return raw();
    add(kind == '{' ? Token::kVariableBegin : Token::kBlockBegin, "");
    starts_line_ = false;
    tag(kind == '{' ? "}}" : "%}", kind == '{' ? Token::kVariableEnd : Token::kBlockEnd);
  }

  static bool is_one_of(char each, std::string_view any) { return any.find(each) != std::string_view::npos; }
  char sign_at(size_t place) const { return place < text_.size() && is_one_of(text_[place], "+-") ? text_[place] : '\0'; }

  // The text before a tag that begins at `end`, without the white space that the tag takes.
  void add_data(size_t end, char sign, bool is_stripped_to_line) {
    std::string_view data(text_.data() + place_, end - place_);
    if (sign == '-') {
      data = stripped(data, false, true);
    } else if (sign == 0 && is_stripped_to_line) {
      const size_t line = data.rfind('\n') + 1;
      if ((line > 0 || starts_line_) && stripped(data.substr(line), true, false).empty()) data = data.substr(0, line);
    }
    if (!data.empty()) add(Token::kData, std::string(data));
  }

  // Behind the end of a tag: a `-` takes all white space, and a block one line end.
  void finish_tag(size_t end, bool takes_space, bool takes_line) {
    move_to(end);
    if (takes_space) skip_space();
    else if (takes_line && at("\n")) move_to(place_ + 1);
    starts_line_ = text_[place_ - 1] == '\n';
  }

  void comment() {
    const size_t end = text_.find("#}", place_);
    if (end == std::string::npos) fail("a comment does not end");
    const char sign = end > place_ ? text_[end - 1] : '\0';
    finish_tag(end + 2, sign == '-', sign != '+');
  }

  bool is_raw() {
    const size_t before = place_, line = line_;
    skip_space();
    bool found = at("raw");
    if (found) {
      move_to(place_ + 3);
      skip_space();
      found = at("%}") || at("-%}");
    }
    if (!found) place_ = before, line_ = line;
    return found;
  }

  void raw() {
    const bool takes_space = at("-%}");
    finish_tag(place_ + (takes_space ? 3 : 2), takes_space, false);
    const size_t begin = place_;
    for (size_t end = text_.find("{%", place_); end != std::string::npos; end = text_.find("{%", end + 1)) {
      const size_t line = line_;
      const char sign = sign_at(end + 2);
      move_to(end + 2 + (sign != 0));
      skip_space();
      if (at("endraw")) {
        move_to(place_ + 6);
        skip_space();
        const bool ends_by_sign = at("-%}") || at("+%}");
        if (ends_by_sign || at("%}")) {
          const size_t finish = place_ + (ends_by_sign ? 3 : 2);
          const bool is_minus = at("-%}"), is_plain = !ends_by_sign;
          place_ = begin;
          add_data(end, sign, true);
          place_ = finish;
          return finish_tag(finish, is_minus, is_plain);
        }
      }
      place_ = begin, line_ = line;
    }
    fail("a raw block does not end");
  }

  void tag(std::string_view close, Token::Kind close_kind) {
    std::string open;  // brackets that are to be closed
    const std::string minus = "-" + std::string(close), plus = "+" + std::string(close);
    const bool is_block = close_kind == Token::kBlockEnd;
    for (;;) {
      skip_space();
      if (place_ >= text_.size()) fail("a tag does not end");
      const bool by_minus = at(minus), by_plus = is_block && at(plus);
      if (open.empty() && (by_minus || by_plus || at(close))) {
        add(close_kind, "");
        return finish_tag(place_ + 2 + (by_minus || by_plus), by_minus, is_block && !by_plus);
      }
      if (is_digit(text_[place_])) number();
      else if (is_letter(text_[place_])) name();
      else if (text_[place_] == '\'' || text_[place_] == '"') quoted();
      else symbol(open);
    }
  }

  size_t after_digits(size_t place) const {
    while (place < text_.size() && is_digit(text_[place])) ++place;
    return place;
  }

  void number() {
    const bool may_be_float = text_[place_ - 1] != '.';
    size_t end = after_digits(place_);
    const size_t whole_end = end;
    if (end + 1 < text_.size() && text_[end] == '.' && is_digit(text_[end + 1])) end = after_digits(end + 1);
    if (end < text_.size() && (text_[end] == 'e' || text_[end] == 'E')) {
      const size_t digits = end + 1 + (sign_at(end + 1) != 0);
      if (digits < text_.size() && is_digit(text_[digits])) end = after_digits(digits);
    }
    const bool is_float = may_be_float && end > whole_end;
    if (!is_float) end = whole_end;
    const std::string digits = text_.substr(place_, end - place_);
    const bool is_odd = !is_float && digits.size() > 1 && digits[0] == '0';
    if (digits.size() > 40 || is_odd || (end < text_.size() && is_letter(text_[end])))
      unsupported("a number such as " + quote_short(text_.substr(place_, end - place_ + 1)));
    add(is_float ? Token::kFloat : Token::kWhole, digits);
    move_to(end);
  }

  void name() {
    size_t end = place_;
    while (end < text_.size() && is_letter(text_[end])) ++end;
    if (end < text_.size() && static_cast<unsigned char>(text_[end]) >= 0x80)
      unsupported("a name beyond ASCII");
    add(Token::kName, text_.substr(place_, end - place_));
    move_to(end);
  }

  void symbol(std::string& open) {
    constexpr std::string_view kPairs[] = {"//", "**", "==", "!=", ">=", "<="};
    for (const std::string_view pair : kPairs) {
      if (at(pair)) return add(Token::kOperator, std::string(pair)), move_to(place_ + 2);
    }
    const char here = text_[place_];
    if (!is_one_of(here, "+-/*%~[](){}><=.:|,;")) {
      if (static_cast<unsigned char>(here) >= 0x80) unsupported("a name beyond ASCII");
      fail("an unexpected character " + quote_short(std::string(1, here)));
    }
    if (is_one_of(here, "([{")) open += here == '(' ? ')' : here == '[' ? ']' : '}';
    if (is_one_of(here, ")]}")) {
      if (open.empty() || open.back() != here) fail("an unexpected " + quote_short(std::string(1, here)));
      open.pop_back();
    }
    add(Token::kOperator, std::string(1, here));
    move_to(place_ + 1);
  }

  void quoted() {
    const char quote = text_[place_];
    std::string made;
    size_t place = place_ + 1;
    while (place < text_.size() && text_[place] != quote) {
      if (text_[place] == '\\') escape(made, place);
      else made += text_[place++];
    }
    if (place >= text_.size()) fail("a text in quotes does not end");
    add(Token::kText, std::move(made));
    move_to(place + 1);
  }

  // As in a literal of Python.
  void escape(std::string& made, size_t& place) {
    if (++place >= text_.size()) fail("a text in quotes does not end");
    constexpr std::string_view kNames = "\\'\"abfnrtv", kLetters = "\\'\"\a\b\f\n\r\t\v";
    const char named = text_[place];
    const size_t found = kNames.find(named);
    if (found != std::string_view::npos) {
      made += kLetters[found], ++place;
    } else if (named == 'x' || named == 'u' || named == 'U') {
      const size_t count = named == 'x' ? 2 : named == 'u' ? 4 : 8;
      uint32_t point = 0;
      for (size_t digit = ++place; digit < place + count; ++digit) {
        if (digit >= text_.size() || !std::isxdigit(static_cast<unsigned char>(text_[digit]))) fail("an escape of too few digits");
        point = point * 16 + static_cast<uint32_t>(std::stoi(text_.substr(digit, 1), nullptr, 16));
      }
      if (point > 0x10ffff) fail("an escape beyond Unicode");
      if (point >= 0xd800 && point <= 0xdfff) unsupported("half of a surrogate pair");
      append_point(made, point), place += count;
    } else if (named == '\n') {
      ++place;
    } else if (named == 'N' || is_digit(named)) {
      unsupported("the escape " + quote_short(text_.substr(place - 1, 2)));
    } else {
      made += '\\';
    }
  }

  const std::string text_;
  std::vector<Token> tokens_;
  size_t place_ = 0, line_ = 1;
  bool starts_line_ = true;
};

}  // namespace

std::vector<Token> tokens_of(const std::string& source) { return Lexer(source).all(); }

}  // namespace edgekit::jinja
