#include "stop_strings.h"

#include <algorithm>
#include <utility>

#include "errors.h"
#include "utf8.h"

namespace edgekit {
namespace {

constexpr size_t kMost = 16, kLongest = 4096;  // stop strings, and bytes of one

}  // namespace

StopStrings::StopStrings(std::vector<std::string> stops) : stops_(std::move(stops)) {
  if (stops_.size() > kMost) refuse("stop: at most " + std::to_string(kMost) + " stop strings are taken");
  for (const std::string& each : stops_) {
    if (each.empty() || each.size() > kLongest || first_invalid(each) < each.size()) {
      refuse("stop: " + quote_short(each) + " is empty, too long or not UTF-8");
    }
    longest_ = std::max(longest_, each.size());
  }
}

std::string StopStrings::push(const std::string& piece) {
  if (stops_.empty()) return piece;
  std::string text = held_ + piece;
  held_.clear();
  size_t first_end = text.npos, start = 0;
  for (const std::string& each : stops_) {
    const size_t found = text.find(each);
    if (found == text.npos) continue;
    const size_t end = found + each.size();
    if (end < first_end || (end == first_end && (found < start || (found == start && each < *stop_)))) {
      first_end = end, start = found, stop_ = each;
    }
  }
  if (stop_) return text.substr(0, start);
  for (size_t length = std::min(longest_ - 1, text.size()); length > 0; --length) {
    const auto begins = [&](const std::string& stop) {
      return stop.size() >= length && text.compare(text.size() - length, length, stop, 0, length) == 0;
    };
    if (std::any_of(stops_.begin(), stops_.end(), begins)) {
      held_ = text.substr(text.size() - length);
      text.resize(text.size() - length);
      break;
    }
  }
  return text;
}

std::string StopStrings::flush() { return std::exchange(held_, ""); }

}  // namespace edgekit
