#include "utf8.h"

namespace edgekit {
namespace {

struct Sequence {
  size_t bytes;  // of the character, or of the part of one that is valid (at least 1)
  bool is_whole;
};

// The character at `place`. The second byte is bounded more closely where longer or surrogate forms would be.
Sequence sequence_at(std::string_view text, size_t place) {
  const auto byte = [&](size_t index) { return static_cast<uint8_t>(text[place + index]); };
  const uint8_t first = byte(0);
  if (first < 0x80) return {1, true};
  const size_t bytes = first >= 0xc2 && first <= 0xdf   ? 2
                       : (first & 0xf0) == 0xe0         ? 3
                       : first >= 0xf0 && first <= 0xf4 ? 4
                                                        : 0;
  if (bytes == 0) return {1, false};
  const uint8_t low = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
  const uint8_t high = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
  for (size_t index = 1; index < bytes; ++index) {
    if (place + index >= text.size()) return {index, false};
    const bool fits = index == 1 ? byte(1) >= low && byte(1) <= high : (byte(index) & 0xc0) == 0x80;
    if (!fits) return {index, false};
  }
  return {bytes, true};
}

}  // namespace

size_t first_invalid(std::string_view text) {
  size_t place = 0;
  while (place < text.size()) {
    const Sequence found = sequence_at(text, place);
    if (!found.is_whole) return place;
    place += found.bytes;
  }
  return place;
}

uint32_t next_point(std::string_view text, size_t& place) {
  const auto first = static_cast<uint8_t>(text[place++]);
  if (first < 0x80) return first;
  const int more = first < 0xe0 ? 1 : first < 0xf0 ? 2 : 3;
  uint32_t point = first & (0x3fu >> more);
  for (int index = 0; index < more; ++index) point = point << 6 | (static_cast<uint8_t>(text[place++]) & 0x3f);
  return point;
}

size_t place_before(std::string_view text, size_t place) {
  do --place;
  while ((static_cast<uint8_t>(text[place]) & 0xc0) == 0x80);
  return place;
}

void append_point(std::string& out, uint32_t point) {
  if (point < 0x80) {
    out += static_cast<char>(point);
    return;
  }
  const int more = point < 0x800 ? 1 : point < 0x10000 ? 2 : 3;
  constexpr uint8_t kFirst[] = {0, 0xc0, 0xe0, 0xf0};
  out += static_cast<char>(kFirst[more] | (point >> (6 * more)));
  for (int index = more - 1; index >= 0; --index) out += static_cast<char>(0x80 | ((point >> (6 * index)) & 0x3f));
}

std::string repaired(std::string_view bytes) {
  std::string out;
  out.reserve(bytes.size());
  for (size_t place = 0; place < bytes.size();) {
    const Sequence found = sequence_at(bytes, place);
    out += found.is_whole ? bytes.substr(place, found.bytes) : kReplacement;
    place += found.bytes;
  }
  return out;
}

}  // namespace edgekit
