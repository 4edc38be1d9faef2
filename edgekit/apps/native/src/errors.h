// Errors are exceptions inside the library: one line that says what happened, the value, and what to do.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace edgekit {

[[noreturn]] inline void refuse(const std::string& line) { throw std::runtime_error(line); }

// Untrusted text for an error: short, printable and in quotes.
inline std::string quote_short(std::string_view text) {
  std::string shown = "'";
  for (const char letter : text.substr(0, 60)) shown += letter >= 0x20 && letter < 0x7f ? letter : '?';
  return shown + (text.size() > 60 ? "...'" : "'");
}

// Untrusted text that may have several lines or control characters, as one line.
inline std::string one_line(std::string_view text) {
  std::string shown;
  for (const char letter : text.substr(0, 400)) shown += static_cast<unsigned char>(letter) >= 0x20 ? letter : ' ';
  return shown;
}

}  // namespace edgekit
