// UTF-8: checked, read by code points, repaired.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace edgekit {

// The place of the first byte that is not UTF-8; the size of the text, if there is none.
size_t first_invalid(std::string_view text);

// The code point at `place`, which moves behind it. The text is UTF-8.
uint32_t next_point(std::string_view text, size_t& place);

// The place of the code point before `place`. The text is UTF-8.
size_t place_before(std::string_view text, size_t place);

void append_point(std::string& out, uint32_t point);

// The text with U+FFFD for each maximal part of a character that is not whole, as Rust and Python replace them.
std::string repaired(std::string_view bytes);

constexpr std::string_view kReplacement = "\xef\xbf\xbd";

}  // namespace edgekit
