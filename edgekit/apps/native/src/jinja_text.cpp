#include "jinja_text.h"

#include <algorithm>

#include "utf8.h"

namespace edgekit::jinja {
namespace {

constexpr size_t kPieceUnits = 4;  // of the budget, for a piece of a text

bool ends_line(uint32_t point) {
  return (point >= 0x0a && point <= 0x0d) || (point >= 0x1c && point <= 0x1e) || point == 0x85 || point == 0x2028 ||
         point == 0x2029;
}

template <typename IsCut>
std::string_view stripped_of(std::string_view text, bool left, bool right, IsCut&& is_cut) {
  size_t begin = 0, end = text.size();
  while (left && begin < end) {
    size_t after = begin;
    if (!is_cut(next_point(text, after))) break;
    begin = after;
  }
  while (right && begin < end) {
    size_t before = place_before(text, end), after = before;
    if (!is_cut(next_point(text, after))) break;
    end = before;
  }
  return text.substr(begin, end - begin);
}

char upper_of(char letter) { return letter >= 'a' && letter <= 'z' ? static_cast<char>(letter - 32) : letter; }
char lower_of(char letter) { return letter >= 'A' && letter <= 'Z' ? static_cast<char>(letter + 32) : letter; }

void check_ascii(std::string_view text) {
  const auto is_beyond = [](char each) { return static_cast<unsigned char>(each) >= 0x80; };
  if (std::any_of(text.begin(), text.end(), is_beyond)) unsupported("upper and lower case of letters beyond ASCII");
}

}  // namespace

bool is_space(uint32_t point) {
  return (point >= 0x09 && point <= 0x0d) || (point >= 0x1c && point <= 0x20) || point == 0x85 || point == 0xa0 ||
         point == 0x1680 || (point >= 0x2000 && point <= 0x200a) || point == 0x2028 || point == 0x2029 ||
         point == 0x202f || point == 0x205f || point == 0x3000;
}

size_t count_points(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char each) { return (static_cast<unsigned char>(each) & 0xc0) != 0x80; }));
}

std::string_view stripped(std::string_view text, bool left, bool right) {
  return stripped_of(text, left, right, is_space);
}

std::string_view stripped(std::string_view text, std::string_view letters, bool left, bool right) {
  std::vector<uint32_t> cut;
  for (size_t place = 0; place < letters.size();) cut.push_back(next_point(letters, place));
  if (cut.size() > 64) unsupported("'strip' of more than 64 letters");
  return stripped_of(text, left, right,
                     [&](uint32_t point) { return std::find(cut.begin(), cut.end(), point) != cut.end(); });
}

std::vector<std::string> lines_of(std::string_view text, Budget& budget) {
  std::vector<std::string> found;
  size_t begin = 0;
  for (size_t place = 0; place < text.size();) {
    const size_t end = place;
    const uint32_t point = next_point(text, place);
    if (!ends_line(point)) continue;
    budget.spend(kPieceUnits);
    if (point == '\r' && place < text.size() && text[place] == '\n') ++place;
    found.emplace_back(text.substr(begin, end - begin));
    begin = place;
  }
  if (begin < text.size()) found.emplace_back(text.substr(begin));
  return found;
}

std::vector<std::string> parts_of(std::string_view text, std::optional<std::string_view> separator, int64_t most,
                                  Budget& budget) {
  std::vector<std::string> found;
  if (most < 0) most = INT64_MAX;
  if (separator) {
    if (separator->empty()) refuse("empty separator");
    for (; most != 0; --most) {
      const size_t place = text.find(*separator);
      if (place == std::string_view::npos) break;
      budget.spend(kPieceUnits);
      found.emplace_back(text.substr(0, place));
      text.remove_prefix(place + separator->size());
    }
    found.emplace_back(text);
    return found;
  }
  for (text = stripped(text, true, false); !text.empty(); text = stripped(text, true, false), --most) {
    size_t end = most == 0 ? text.size() : 0;
    for (size_t place = 0; most != 0 && place < text.size();) {
      if (is_space(next_point(text, place))) break;
      end = place;
    }
    budget.spend(kPieceUnits);
    found.emplace_back(text.substr(0, end));
    text.remove_prefix(end);
  }
  return found;
}

std::vector<std::string> parts_from_the_right(std::string_view text, std::string_view separator, int64_t most,
                                              Budget& budget) {
  if (separator.empty()) refuse("empty separator");
  std::vector<std::string> found;
  if (most < 0) most = INT64_MAX;
  for (; most != 0; --most) {
    const size_t place = text.rfind(separator);
    if (place == std::string_view::npos) break;
    budget.spend(kPieceUnits);
    found.emplace_back(text.substr(place + separator.size()));
    text = text.substr(0, place);
  }
  found.emplace_back(text);
  std::reverse(found.begin(), found.end());
  return found;
}

std::string upper(std::string text) {
  check_ascii(text);
  std::transform(text.begin(), text.end(), text.begin(), upper_of);
  return text;
}

std::string lower(std::string text) {
  check_ascii(text);
  std::transform(text.begin(), text.end(), text.begin(), lower_of);
  return text;
}

std::string capitalized(const std::string& text) {
  std::string made = lower(text);
  if (!made.empty()) made[0] = upper_of(made[0]);
  return made;
}

std::string title(const std::string& text) {
  std::string made = lower(text);
  bool begins = true;
  for (char& each : made) {
    if (begins) each = upper_of(each);
    begins = is_space(static_cast<unsigned char>(each)) || std::string_view("-({[<").find(each) != std::string_view::npos;
  }
  return made;
}

std::string replaced(const std::string& text, const std::string& old, const std::string& with, int64_t most,
                     Budget& budget) {
  if (old.empty()) unsupported("'replace' of nothing");
  if (most < 0) most = INT64_MAX;
  std::string made;
  size_t begin = 0;
  for (; most != 0; --most) {
    const size_t place = text.find(old, begin);
    if (place == std::string::npos) break;
    budget.spend_bytes(with.size());
    made.append(text, begin, place - begin).append(with);
    begin = place + old.size();
  }
  return made.append(text, begin, std::string::npos);
}

}  // namespace edgekit::jinja
