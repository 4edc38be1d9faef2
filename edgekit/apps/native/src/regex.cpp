#include "regex.h"

#include <algorithm>
#include <cctype>
#include <utility>

#include "errors.h"
#include "utf8.h"

namespace edgekit {
namespace {

constexpr size_t kUnbounded = static_cast<size_t>(-1);
constexpr size_t kMostItems = 4096;  // of all alternatives together
constexpr size_t kMostPattern = 4096;
constexpr int kDeepest = 8;

}  // namespace

class RegexParser {
 public:
  explicit RegexParser(const std::string& pattern) : pattern_(pattern) {
    if (pattern.size() > kMostPattern || first_invalid(pattern) < pattern.size()) fail("it is too long or not UTF-8");
  }

  std::vector<Regex::Sequence> whole() {
    auto found = alternatives(false, 0);
    if (place_ < pattern_.size()) fail("a ) without its (");
    for (const Sequence& each : found) {
      const auto may_be_empty = [](const Item& item) { return item.least == 0 || item.looks != 0; };
      if (std::all_of(each.begin(), each.end(), may_be_empty)) fail("it matches where there is nothing");
    }
    return found;
  }

 private:
  using Sequence = Regex::Sequence;
  using Item = Regex::Item;

  [[noreturn]] void fail(const std::string& why) const {
    refuse("the pattern " + quote_short(pattern_) + " of a pre-tokenizer cannot be used: " + why + " at byte " +
           std::to_string(place_));
  }

  bool is_next(char letter) const { return place_ < pattern_.size() && pattern_[place_] == letter; }
  bool takes(std::string_view text) {
    if (std::string_view(pattern_).substr(place_, text.size()) != text) return false;
    place_ += text.size();
    return true;
  }

  std::vector<Sequence> alternatives(bool ignores_case, int depth) {
    if (depth > kDeepest) fail("groups nested too deeply");
    std::vector<Sequence> found;
    do {
      for (Sequence& each : sequence(ignores_case, depth)) found.push_back(std::move(each));
    } while (takes("|"));
    return found;
  }

  std::vector<Sequence> sequence(bool ignores_case, int depth) {
    std::vector<Sequence> found{{}};
    while (place_ < pattern_.size() && !is_next('|') && !is_next(')')) {
      found = product(found, part(ignores_case, depth));
    }
    return found;
  }

  std::vector<Sequence> product(const std::vector<Sequence>& first, const std::vector<Sequence>& second) const {
    std::vector<Sequence> found;
    size_t items = 0;
    for (const Sequence& start : first) {
      for (const Sequence& end : second) {
        items += start.size() + end.size();
        if (items > kMostItems) fail("too many alternatives");
        found.push_back(start);
        found.back().insert(found.back().end(), end.begin(), end.end());
      }
    }
    return found;
  }

  std::vector<Sequence> part(bool ignores_case, int depth) {
    if (takes("(?!")) return {{looking(-1)}};
    if (takes("(?=")) return {{looking(1)}};
    if (is_next('(')) return group(ignores_case, depth);
    Item item = single(ignores_case);
    count(item);
    return {{std::move(item)}};
  }

  Item looking(int looks) {
    Item item = single(false);
    item.looks = looks;
    if (!takes(")")) fail("a lookahead of more than one character");
    return item;
  }

  std::vector<Sequence> group(bool ignores_case, int depth) {
    if (takes("(?i:")) ignores_case = true;
    else if (!takes("(?:")) takes("(");
    if (is_next('?')) fail("a group of this kind");
    auto found = alternatives(ignores_case, depth + 1);
    if (!takes(")")) fail("a ( without its )");
    if (takes("?")) found.push_back({});
    if (is_next('*') || is_next('+') || is_next('{') || is_next('?')) fail("a group that is repeated");
    return found;
  }

  void count(Item& item) {
    if (takes("?")) item.least = 0;
    else if (takes("*")) item.least = 0, item.most = kUnbounded;
    else if (takes("+")) item.most = kUnbounded;
    else if (takes("{")) {
      item.least = item.most = number();
      if (takes(",")) item.most = is_next('}') ? kUnbounded : number();
      if (!takes("}") || item.most < item.least) fail("a count that is not {n,m}");
    } else return;
    if (is_next('?') || is_next('+') || is_next('*') || is_next('{'))
      fail("a count that is lazy, possessive or double");
  }

  size_t number() {
    size_t found = 0, digits = 0;
    for (; place_ < pattern_.size() && pattern_[place_] >= '0' && pattern_[place_] <= '9'; ++place_, ++digits) {
      found = found * 10 + static_cast<size_t>(pattern_[place_] - '0');
    }
    if (digits == 0 || digits > 4) fail("a count that is not {n,m}");
    return found;
  }

  Item single(bool ignores_case) {
    Item item;
    if (takes("[")) {
      item.is_negated = takes("^");
      while (!is_next(']')) {
        if (is_next('[') || takes("&&")) fail("a class inside a class");
        member(item, ignores_case, true);
      }
      ++place_;
    } else {
      if (place_ < pattern_.size() && std::string_view(".^$*+?{}").find(pattern_[place_]) != std::string_view::npos) {
        fail("the sign " + quote_short(pattern_.substr(place_, 1)));
      }
      member(item, ignores_case, false);
    }
    return item;
  }

  void member(Item& item, bool ignores_case, bool may_range) {
    if (add_class(item)) return;
    const uint32_t first = literal();
    uint32_t last = first;
    if (may_range && is_next('-') && place_ + 1 < pattern_.size() && pattern_[place_ + 1] != ']') {
      ++place_;
      last = literal();
      if (last < first) fail("a range that ends before it begins");
    }
    item.ranges.push_back({first, last});
    if (!ignores_case) return;
    for (uint32_t letter = 'a'; letter <= 'z'; ++letter) {
      const uint32_t upper = letter - 'a' + 'A', odd = letter == 's' ? 0x17f : letter == 'k' ? 0x212a : upper;
      for (const uint32_t each : {letter, upper, odd}) {
        if (first > each || each > last) continue;
        for (const uint32_t other : {letter, upper, odd}) item.ranges.push_back({other, other});
      }
    }
    if (last > 0x7f && (first != last || (first != 0x17f && first != 0x212a))) {
      fail("letters beyond ASCII in any case");
    }
  }

  bool add_class(Item& item) {
    if (takes("\\s")) return item.classes.push_back({&kSpaces, false}), true;
    if (takes("\\S")) return item.classes.push_back({&kSpaces, true}), true;
    for (const bool is_negated : {false, true}) {
      for (const auto& [name, points] : {std::pair{"{L}", &kLetters}, std::pair{"{N}", &kNumbers}}) {
        if (takes((is_negated ? "\\P" : "\\p") + std::string(name))) {
          return item.classes.push_back({points, is_negated}), true;
        }
      }
    }
    return false;
  }

  uint32_t literal() {
    if (place_ >= pattern_.size()) fail("it ends too soon");
    if (!takes("\\")) return next_point(pattern_, place_);
    if (place_ >= pattern_.size()) fail("it ends too soon");
    const char escaped = pattern_[place_++];
    switch (escaped) {
      case 'n': return '\n';
      case 'r': return '\r';
      case 't': return '\t';
      default: break;
    }
    const bool is_sign = escaped > 0x20 && escaped < 0x7f && !std::isalnum(static_cast<unsigned char>(escaped));
    if (!is_sign) --place_, fail("the escape \\" + pattern_.substr(place_, 1));
    return static_cast<uint32_t>(escaped);
  }

  const std::string& pattern_;
  size_t place_ = 0;
};

Regex::Regex(const std::string& pattern) : alternatives_(RegexParser(pattern).whole()) {}

bool Regex::Item::takes(uint32_t point) const {
  const bool is_in = std::any_of(ranges.begin(), ranges.end(),
                                 [&](const PointRange& r) { return r.first <= point && point <= r.last; }) ||
                     std::any_of(classes.begin(), classes.end(),
                                 [&](const Class& c) { return contains(*c.points, point) != c.is_negated; });
  return is_in != is_negated;
}

size_t Regex::match(std::string_view text, size_t place, int64_t& steps) const {
  for (const Sequence& items : alternatives_) {
    const size_t end = match_from(items, 0, text, place, steps);
    if (end != std::string_view::npos) return end;
  }
  return std::string_view::npos;
}

size_t Regex::match_from(const Sequence& items, size_t index, std::string_view text, size_t place,
                         int64_t& steps) const {
  if (--steps < 0)
    refuse("the pattern of the pre-tokenizer takes too long on this text; export from another tokenizer");
  if (index == items.size()) return place;
  const Item& item = items[index];
  size_t end = place;
  if (item.looks != 0) {
    const bool is_in = end < text.size() && item.takes(next_point(text, end));
    return is_in == (item.looks > 0) ? match_from(items, index + 1, text, place, steps) : std::string_view::npos;
  }
  size_t count = 0;
  for (; count < item.most && end < text.size(); ++count) {
    size_t after = end;
    if (!item.takes(next_point(text, after))) break;
    end = after;
    --steps;
  }
  for (; count >= item.least; --count, end = place_before(text, end)) {
    const size_t found = match_from(items, index + 1, text, end, steps);
    if (found != std::string_view::npos) return found;
    if (count == 0) break;
  }
  return std::string_view::npos;
}

}  // namespace edgekit
