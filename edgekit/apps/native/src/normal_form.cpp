#include "normal_form.h"

#include <algorithm>
#include <tuple>
#include <vector>

#include "utf8.h"

namespace edgekit {
namespace {

// Syllables of Hangul are composed of two or three letters by arithmetic.
constexpr uint32_t kSyllable = 0xac00, kLead = 0x1100, kVowel = 0x1161, kTail = 0x11a7;
constexpr uint32_t kLeads = 19, kVowels = 21, kTails = 28, kSyllables = kLeads * kVowels * kTails;

struct Mark {
  uint32_t point, number;  // 0: it is no mark but begins anew
};

uint32_t class_of(uint32_t point) {
  const auto* end = kCombiningClasses + kCombiningClassCount;
  const auto* found = std::upper_bound(kCombiningClasses, end, point,
                                       [](uint32_t wanted, const CombiningClass& each) { return wanted < each.first; });
  if (found == kCombiningClasses || point > (--found)->last) return 0;
  return found->number;
}

void decompose(uint32_t point, std::vector<Mark>& out) {
  if (point >= kSyllable && point < kSyllable + kSyllables) {
    const uint32_t index = point - kSyllable, tail = index % kTails;
    out.push_back({kLead + index / (kVowels * kTails), 0});
    out.push_back({kVowel + index % (kVowels * kTails) / kTails, 0});
    if (tail != 0) out.push_back({kTail + tail, 0});
    return;
  }
  const auto* end = kDecompositions + kDecompositionCount;
  const auto* found = std::lower_bound(kDecompositions, end, point,
                                       [](const Decomposition& each, uint32_t wanted) { return each.point < wanted; });
  if (found == end || found->point != point) {
    out.push_back({point, class_of(point)});
    return;
  }
  for (const uint32_t part : found->parts) {
    if (part != 0) out.push_back({part, class_of(part)});
  }
}

// What two code points become together; 0: they stay two.
uint32_t composed(uint32_t first, uint32_t second) {
  if (first >= kLead && first < kLead + kLeads && second >= kVowel && second < kVowel + kVowels)
    return kSyllable + ((first - kLead) * kVowels + (second - kVowel)) * kTails;
  const bool is_open = first >= kSyllable && first < kSyllable + kSyllables && (first - kSyllable) % kTails == 0;
  if (is_open && second > kTail && second < kTail + kTails) return first + (second - kTail);
  const auto* end = kCompositions + kCompositionCount;
  const auto* found = std::lower_bound(kCompositions, end, std::tie(first, second), [](const Composition& each, const auto& wanted) {
    return std::tie(each.first, each.second) < wanted;
  });
  return found != end && found->first == first && found->second == second ? found->made : 0;
}

// Marks behind a letter stand in the order of their classes.
void order_marks(std::vector<Mark>& marks) {
  for (auto begin = marks.begin(); begin != marks.end();) {
    const auto is_mark = [](const Mark& each) { return each.number != 0; };
    const auto first = std::find_if(begin, marks.end(), is_mark), last = std::find_if_not(first, marks.end(), is_mark);
    std::stable_sort(first, last, [](const Mark& one, const Mark& other) { return one.number < other.number; });
    begin = last;
  }
}

}  // namespace

std::string normal_form_c(std::string_view text) {
  if (std::all_of(text.begin(), text.end(), [](char each) { return static_cast<unsigned char>(each) < 0x80; }))
    return std::string(text);
  std::vector<Mark> marks;
  for (size_t place = 0; place < text.size();) decompose(next_point(text, place), marks);
  order_marks(marks);
  std::vector<uint32_t> made;
  size_t letter = 0;
  bool has_letter = false;
  uint32_t before = 0;  // the class of what was kept last behind the letter
  for (const Mark& each : marks) {
    const bool is_beside = has_letter && (letter + 1 == made.size() || (before != 0 && before < each.number));
    const uint32_t whole = is_beside ? composed(made[letter], each.point) : 0;
    if (whole != 0) {
      made[letter] = whole;
      continue;
    }
    if (each.number == 0) letter = made.size(), has_letter = true;
    before = each.number;
    made.push_back(each.point);
  }
  std::string out;
  for (const uint32_t point : made) append_point(out, point);
  return out;
}

}  // namespace edgekit
