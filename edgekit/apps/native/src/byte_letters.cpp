#include "byte_letters.h"

#include <array>

#include "utf8.h"

namespace edgekit {
namespace {

constexpr uint32_t kFirstHidden = 0x100;  // bytes that are not visible in Latin-1 are letters from here on
constexpr uint32_t kLetters = kFirstHidden + 68;

constexpr bool is_visible(uint32_t byte) {
  return (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || (byte >= 0xae && byte <= 0xff);
}

struct Alphabet {
  std::array<uint16_t, 256> letter_of{};
  std::array<int16_t, kLetters> byte_of{};

  constexpr Alphabet() {
    for (auto& each : byte_of) each = -1;
    uint32_t hidden = kFirstHidden;
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const uint32_t letter = is_visible(byte) ? byte : hidden++;
      letter_of[byte] = static_cast<uint16_t>(letter);
      byte_of[letter] = static_cast<int16_t>(byte);
    }
  }
};

constexpr Alphabet kAlphabet;

}  // namespace

std::string to_byte_letters(std::string_view bytes) {
  std::string out;
  out.reserve(bytes.size() * 2);
  for (const char byte : bytes) append_point(out, kAlphabet.letter_of[static_cast<uint8_t>(byte)]);
  return out;
}

int byte_of_letter(uint32_t point) { return point < kLetters ? kAlphabet.byte_of[point] : -1; }

}  // namespace edgekit
