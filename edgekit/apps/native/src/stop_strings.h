// Releases text up to the first complete stop string, however the text is split into pieces.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace edgekit {

class StopStrings {
 public:
  explicit StopStrings(std::vector<std::string> stops);  // throws std::runtime_error

  // Add text; what is released of it. An end that may become a stop string is held back.
  std::string push(const std::string& piece);
  std::string flush();  // what was held back and did not become a stop string

  const std::optional<std::string>& stop() const { return stop_; }  // the one that was found

 private:
  const std::vector<std::string> stops_;
  size_t longest_ = 0;
  std::string held_;
  std::optional<std::string> stop_;
};

}  // namespace edgekit
