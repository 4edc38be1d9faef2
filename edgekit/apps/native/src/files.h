// Reading files that may be anything.
#pragma once

#include <cstddef>
#include <string>

namespace edgekit {

// A regular file of at most `limit` bytes, whole. Throws std::runtime_error.
std::string read_file(const std::string& path, size_t limit);

}  // namespace edgekit
